"""How far a run is: bars in a terminal, plain lines elsewhere. No widgets, no colours.

Times left come from what each cell took in the former run; where nothing is known it says so by a question mark.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm  # not tqdm.auto: that draws widgets where ipywidgets is installed


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class _Running:
    cells_s: Sequence[float]  # of the former run; empty: unknown
    start: float = field(default_factory=time.monotonic)
    cell_start: float = field(default_factory=time.monotonic)
    cell: int = 0
    of: int = 0
    bar: Any = None

    def left_s(self, expected_s: float | None) -> float | None:
        now = time.monotonic()
        if self.of and len(self.cells_s) == self.of:
            running = max(0.0, self.cells_s[self.cell - 1] - (now - self.cell_start)) if self.cell else 0.0
            return running + sum(self.cells_s[self.cell :])
        return None if expected_s is None else max(0.0, expected_s - (now - self.start))


class Progress:
    """One bar per running chapter and one over all; `expected_s` and `cells_s` are by chapter, from former runs."""

    def __init__(
        self,
        chapters: Sequence[str],
        expected_s: Mapping[str, float],
        cells_s: Mapping[str, Sequence[float]],
        jobs: int,
    ) -> None:
        self._pending = list(chapters)
        self._expected_s = dict(expected_s)
        self._cells_s = cells_s
        self._jobs = jobs
        self._running: dict[str, _Running] = {}
        self._width = max(map(len, chapters), default=8)
        self._bars = sys.stderr.isatty()
        self._total = self._bar(0, "all", len(chapters), "chapters") if self._bars and chapters else None

    def _bar(self, position: int, name: str, total: int, unit: str) -> Any:
        text = f"{{desc}} {{bar:24}} {{n_fmt}}/{{total_fmt}} {unit}{{postfix}}"
        return tqdm(
            total=total, desc=f"{name:<{self._width}}", position=position, leave=False, bar_format=text,
            file=sys.stderr, dynamic_ncols=True,
        )  # fmt: skip

    def say(self, text: str) -> None:
        """A line that stays, above the bars."""
        if self._bars:
            tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def start(self, name: str, why: str) -> None:
        self._pending.remove(name)
        self._running[name] = _Running(self._cells_s.get(name, ()))
        expected_s = self._expected_s.get(name)
        about = f", about {clock(expected_s)}" if expected_s is not None else ""
        self.say(f"{name}: starts ({why}{about})")

    def cell(self, name: str, cell: int, of: int) -> None:
        """The chapter begins its cell number `cell` of `of`."""
        state = self._running[name]
        state.cell, state.of, state.cell_start = cell, of, time.monotonic()
        if self._bars and state.bar is None:
            taken = {other.bar.pos for other in self._running.values() if other.bar is not None}
            free = next(p for p in range(1, len(self._running) + 1) if -p not in taken and p not in taken)
            state.bar = self._bar(free, name, of, "cells")
        if state.bar is not None:
            state.bar.update(cell - 1 - state.bar.n)

    def finish(self, name: str, text: str) -> None:
        state = self._running.pop(name)
        if state.bar is not None:
            state.bar.close()
        if self._total is not None:
            self._total.update(1)
        self.say(f"{name}: {text}")

    def left_s(self) -> float | None:
        """Seconds to the end of the run, as far as anything is known."""
        lefts = [state.left_s(self._expected_s.get(name)) for name, state in self._running.items()]
        lefts += [self._expected_s.get(name) for name in self._pending]
        known = [left for left in lefts if left is not None]
        if not known:
            return None if lefts else 0.0
        return sum(known) / len(known) * len(lefts) / min(self._jobs, len(lefts))

    def tick(self) -> None:
        """Draws the bars anew; call it now and then."""
        if self._total is None:
            return
        for name, state in self._running.items():
            if state.bar is not None:
                left_s = state.left_s(self._expected_s.get(name))
                spent = clock(time.monotonic() - state.start)
                state.bar.set_postfix_str(f"{spent}, {'?' if left_s is None else clock(left_s)} left")
        left_s = self.left_s()
        self._total.set_postfix_str(f"{'?' if left_s is None else clock(left_s)} left")

    def close(self) -> None:
        for state in self._running.values():
            if state.bar is not None:
                state.bar.close()
        if self._total is not None:
            self._total.close()

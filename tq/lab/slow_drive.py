"""The streamed trainer on a drive that is held to a rate, as of a disk of another kind or over a network.

The drive is the real one. After each transfer its thread waits until a drive of that rate, which serves one transfer
after the other, would have finished it: reads and writes share the rate, whichever thread they come from.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tq.lab import streaming
from tq.lab.streaming import THREADS
from tq.train.stream.files import Pages


class Drive:
    """Serves transfers one after the other, at no more than so many bytes a second."""

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"rate must be positive, got {rate}")
        self.rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def serve(self, began: float, nbytes: int) -> None:
        """Returns when a transfer that began then would be through."""
        with self._lock:
            self._free = max(self._free, began) + nbytes / self.rate
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))


def hold(rate: float) -> None:
    """All files of the trainer in this process lie on one such drive from now on."""
    drive, read, write = Drive(rate), Pages.read, Pages.write

    def slow_read(self: Pages, offset: int, buffer: Tensor) -> None:
        began = time.perf_counter()
        read(self, offset, buffer)
        drive.serve(began, buffer.nbytes)

    def slow_write(self: Pages, offset: int, buffer: Tensor) -> None:
        began = time.perf_counter()
        write(self, offset, buffer)
        drive.serve(began, buffer.nbytes)

    Pages.read, Pages.write = slow_read, slow_write  # type: ignore[method-assign]


def pairs(full: bool, rate: float) -> list[dict[str, Any]]:
    """Tasks of ``paired``: moments in fp32 and in 4 and 8 bits."""
    run = dict(hidden=512, seq=64, layers=6, batch=1, steps=6, impl="auto")
    sides: dict[str, Any] = {"fp32": {"state": None}, "codes": {"state": [4, 8]}}
    return [dict(run=run, sides=sides, rate=rate, turn=k) for k in range(6 if full else 0)]


def paired(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Seconds of a step, the share of it that waited, and losses, of each of ``sides``, which take turns to be first.

    task: "run", fields of ``streaming``; "sides", what each adds; "rate" of the drive in bytes a second, None for the
    drive as it is; "turn". device: always the CPU.
    """
    found: dict[str, Any] = {}
    for name in list(task["sides"])[:: 1 if task["turn"] % 2 == 0 else -1]:
        with tempfile.TemporaryDirectory() as place:
            job = {"way": "streamed", "place": place, "ceiling": None, **task["run"], **task["sides"][name]}
            done = subprocess.run(
                [sys.executable, "-m", "tq.lab.slow_drive", str(task["rate"] or 0), json.dumps(job)],
                capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2], check=False,
                env={**os.environ, "MALLOC_ARENA_MAX": "1", **dict.fromkeys(THREADS, "1")},
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"a streamed run failed: {done.stderr[-500:]}")
        side = json.loads(done.stdout.splitlines()[-1])
        step = statistics.median(side["seconds"][2:])
        found |= {f"{name}_s": step, f"{name}_waited": statistics.median(side["waited"][2:]) / step}
        found |= {f"{name}_losses": side["losses"]}
    return found


if __name__ == "__main__":
    if float(sys.argv[1]):
        hold(float(sys.argv[1]))
    streaming.main(sys.argv[2])

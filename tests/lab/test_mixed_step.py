"""Steps of every way are timed in processes of their own, and are compared with the plain ones of their round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tq.lab import mixed_step
from tq.lab.mixed_step import SHAPES, TOKENS, WAYS, Row, measure, steps


def test_the_share_is_the_step_s_operations_over_what_products_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_step, "products_per_s", lambda *_: 1e12)
    seconds, used = steps("plain", "tiny", 256, count=2)
    shape = replace(SHAPES["tiny"], vocab=256)
    assert seconds > 0 and used == pytest.approx(shape.flops_per_token() * TOKENS / seconds / 1e12)


def test_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, call: object, way: str, *_: object) -> Pool:
            self.way = way
            calls.append(way)
            return self

        def result(self) -> tuple[float, float]:
            slower = 1 + calls.count(self.way)  # the machine, in the second round
            return slower * (0.5 if "compiled" in self.way else 1.0), 0.25

    calls: list[str] = []
    monkeypatch.setattr(mixed_step, "ProcessPoolExecutor", Pool)
    rows = measure("tiny", 256, rounds=2, progress=False)
    assert calls == [*WAYS, *WAYS] and rows["compiled"] == Row([1.0, 1.5], [0.25, 0.25], [0.5, 0.5])
    assert rows["plain"].ratios == [1.0, 1.0] and rows["compiled"].spread("seconds").median == 1.25


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="preset must be one of"):
        measure("gpt9")

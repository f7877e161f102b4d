"""Tokens per second foretold: rates that made the times are found again, and turns time what they say."""

from __future__ import annotations

import numpy as np
import pytest

from tq.infer import trained
from tq.lab import decoding_forecast as study


def made(layers: int, nbytes: float, seconds: float) -> dict[str, object]:
    return {"layers": layers, "nbytes": nbytes, "seconds": [seconds, 0.9 * seconds, 2 * seconds]}


def test_rates_that_made_the_times_are_found_again() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        speed, layer = 10 ** draw.uniform(9, 11), 10 ** draw.uniform(-6, -3)
        sizes = [(int(n), 10 ** draw.uniform(6, 9)) for n in draw.integers(2, 40, 5)]
        told = study.rates([made(n, b, b / speed + n * layer) for n, b in sizes])
        assert told == pytest.approx((speed, layer), rel=1e-6)
        assert study.foretold(made(30, 7e7, 1.0), *told) == pytest.approx(7e7 / speed + 30 * layer)


def test_times_that_no_rates_explain_are_refused() -> None:
    with pytest.raises(ValueError, match="no positive rates fit"):
        study.rates([made(2, 1e6, 1.0), made(2, 2e6, 0.5), made(2, 4e6, 0.1)])


@pytest.mark.skipif(trained.obstacle() is not None, reason="the book's small model is not there")
def test_turns_time_every_decoder() -> None:
    task = {"name": "book", "fitted": [(1, 64, 128), (2, 128, 128)], "bits": 4, "tokens": 8, "rounds": 2}
    found = study.task(task)
    assert [one["layers"] for one in (found["asked"], *found["fitted"])] == [6, 1, 2]
    assert all(len(one["seconds"]) == 16 and one["nbytes"] > 0 for one in (found["asked"], *found["fitted"]))
    assert found["fitted"][1]["nbytes"] > found["fitted"][0]["nbytes"]

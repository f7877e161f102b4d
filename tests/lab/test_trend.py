"""A line through gaps foretells what lies on it, and says no where the next point does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import linregress

from tq.lab.trend import fitted

SIZES = (1e5, 1e6, 1e7)


def _pairs(mean: float, deviation: float, n: int, seed: int) -> list[float]:
    return list(np.random.default_rng(seed).normal(mean, deviation, n))


def _line(x: float) -> float:
    return 0.001 + 0.0005 * math.log10(x / 1e6)


def test_with_equal_errors_it_is_the_plain_least_squares_line() -> None:
    exact = {x: [_line(x) + 0.002 * x / 1e7 + d for d in (-0.001, 0.001)] for x in SIZES}
    found, plain = fitted(exact), linregress([5, 6, 7], [sum(pairs) / 2 for pairs in exact.values()])
    assert found.slope == pytest.approx(plain.slope) and found.at(1e8).mean == pytest.approx(
        plain.intercept + 8 * plain.slope
    )


def test_a_noisy_point_has_little_weight() -> None:
    points = {x: _pairs(_line(x), 1e-5, 8, int(x)) for x in SIZES}
    points[1e8] = _pairs(1.0, 1.0, 8, 4)
    assert fitted(points).slope == pytest.approx(0.0005, rel=0.05)


def test_intervals_hold_the_truth_in_nineteen_of_twenty_cases() -> None:
    held, foretold = [], []
    for seed in range(300):
        trend = fitted({x: _pairs(_line(x), 0.002, 8, 10 * seed + k) for k, x in enumerate(SIZES)})
        held.append(abs(trend.at(1e8).mean - _line(1e8)) <= trend.at(1e8).half_width)
        foretold.append(trend.foretells(1e8, _pairs(_line(1e8), 0.002, 8, 10 * seed + 9)))
        assert not trend.foretells(1e8, _pairs(_line(1e8) + 0.05, 0.002, 8, seed))
    assert 0.91 < np.mean(held) < 0.985
    assert np.mean(foretold) > 0.95  # two intervals are added as if in quadrature, so a little more than 95 %


def test_too_little_is_refused() -> None:
    for wrong, said in (
        ({1e6: [0.1, 0.2]}, "1 points"), ({1e6: [0.1], 1e7: [0.1, 0.2]}, "1 pairs"),
        ({0.0: [0.1, 0.2], 1.0: [0.1, 0.2]}, "x must be positive"),
        ({1.0: [0.1, 0.1], 2.0: [0.1, 0.2]}, "no weight"), ({1.0: [math.nan, 1.0], 2.0: [0.1, 0.2]}, "NaN"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            fitted(wrong)

"""Equivalence is shown, not inferred from noise; the tests err as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t

from tq.lab.equivalence import Equivalence, calibrated, coverage, differs, equivalence, holm, pairs_needed

MARGIN = 0.003


def _pairs(mean: float, deviation: float, n: int, seed: int) -> tuple[list[float], list[float]]:
    random = np.random.default_rng(seed)
    base = random.normal(3.0, 0.1, n)
    return list(base + random.normal(mean, deviation, n)), list(base)


def test_noise_makes_equivalence_harder_and_not_easier() -> None:
    quiet = equivalence(*_pairs(0.0, 0.001, 8, 1), MARGIN)
    noisy = equivalence(*_pairs(0.0, 0.02, 8, 1), MARGIN)
    assert quiet.holds and not noisy.holds
    assert noisy.low < 0 < noisy.high  # the interval holds zero, and that shows nothing


def test_the_interval_lies_within_the_margin_exactly_where_the_tests_pass() -> None:
    for seed in range(200):
        found = equivalence(*_pairs(0.002, 0.002, 6, seed), MARGIN)
        assert found.holds == (-MARGIN < found.low and found.high < MARGIN)
        differences = np.subtract(*_pairs(0.002, 0.002, 6, seed))
        half = t.ppf(0.95, 5) * differences.std(ddof=1) / math.sqrt(6)
        assert found.high - found.mean == pytest.approx(half)


def test_a_difference_of_the_margin_passes_in_one_case_of_twenty_at_most() -> None:
    passed = np.mean([equivalence(*_pairs(MARGIN, 0.002, 8, seed), MARGIN).holds for seed in range(400)])
    assert 0.03 < passed < 0.07


def test_what_is_not_finite_or_not_there_is_no_equivalence() -> None:
    broken = equivalence([1.0, math.nan], [1.0, 1.0], MARGIN)
    assert not broken.holds and broken.p == 1 and math.isnan(broken.mean)
    assert equivalence([1.0, 2.0], [1.0, 2.0], MARGIN).holds  # the same bits
    assert not equivalence([1.5, 2.5], [1.0, 2.0], MARGIN).holds
    for call in (
        lambda: equivalence([1.0], [1.0], MARGIN), lambda: equivalence([1.0, 2.0], [1.0], MARGIN),
        lambda: equivalence([1.0, 2.0], [1.0, 2.0], 0.0),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            call()
    assert "not shown to be equivalent" in str(broken)
    assert "equivalent within 0.003" in str(Equivalence(0.0, -0.001, 0.001, MARGIN, 0.01, 8))


def test_holm_is_the_step_down_of_the_paper() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"alone": 0.04}) == {"alone": 0.04} and holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    random, wrong = np.random.default_rng(0), 0
    for _ in range(2000):  # sixteen arms without any effect: one false finding in twenty figures
        wrong += min(holm({str(k): float(p) for k, p in enumerate(random.random(16))}).values()) < 0.05
    assert 0.03 < wrong / 2000 < 0.07


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 0.004), (0.001, 0.003)])
def test_as_many_pairs_as_are_needed_pass_as_often_as_was_asked(mean: float, deviation: float) -> None:
    n = pairs_needed(deviation, MARGIN, 0.8, mean)
    passed = np.mean([equivalence(*_pairs(mean, deviation, n, seed), MARGIN).holds for seed in range(400)])
    fewer = np.mean([equivalence(*_pairs(mean, deviation, n // 2, seed), MARGIN).holds for seed in range(400)])
    assert 0.75 < passed < 0.9 and fewer < 0.6
    with pytest.raises(ValueError, match="below margin"):
        pairs_needed(deviation, MARGIN, 0.8, MARGIN)


def test_coverage_is_that_of_the_intervals() -> None:
    random = np.random.default_rng(3)
    nulls = random.normal(0, 1, 60)
    good, heavy = coverage(list(nulls), 8), coverage(list(random.standard_t(1, 40)), 8)
    assert calibrated(good) and good == pytest.approx(0.95, abs=0.02) and heavy > 0.97
    shares = [coverage(list(random.normal(0, 1, 40)), 8, 500) for _ in range(100)]
    assert np.mean(shares) == pytest.approx(0.95, abs=0.01) and np.std(shares) < 0.02, "no luck of the nulls' mean"
    with pytest.raises(ValueError, match=r"their mean 0\.\d+ is not zero"):
        coverage(list(nulls + 1.0), 8)
    assert coverage(list(nulls), 8) == good and coverage(list(nulls), 8, seed=1) == pytest.approx(good, abs=0.02)
    for call in (lambda: coverage([0.0] * 39, 8), lambda: coverage(list(nulls), 1), lambda: coverage(list(nulls), 61)):
        with pytest.raises(ValueError, match="at least 40"):
            call()


def test_a_difference_is_found_where_there_is_none_in_one_case_of_twenty() -> None:
    found = np.mean([differs(*_pairs(0.0, 0.002, 8, seed)) < 0.05 for seed in range(400)])
    assert 0.03 < found < 0.07
    assert differs(*_pairs(0.004, 0.001, 8, 1)) < 1e-4
    assert differs([1.0, 2.0], [1.0, 2.0]) == 1 and differs([1.5, 2.5], [1.0, 2.0]) == 0
    with pytest.raises(ValueError, match="NaN"):
        differs([1.0, math.nan], [1.0, 1.0])
    with pytest.raises(ValueError, match="two at least"):
        differs([1.0], [1.0])

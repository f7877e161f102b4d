"""Paired gaps against SciPy's own t test."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tq.lab.stats import Gap, around, gap, quartiles, record, smoothed

finite = st.floats(-1e12, 1e12)


def test_gap_is_the_paired_t_interval() -> None:
    a, b = [1.0, 2.0, 3.5, 4.0], [0.9, 2.2, 3.1, 3.7]
    found, expected = gap(a, b), stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found.mean - found.half_width == pytest.approx(expected.low) and found.high == pytest.approx(expected.high)
    assert str(found) == f"{found.mean:+.4f} ± {found.half_width:.4f}"


def test_one_pair_has_no_interval() -> None:
    found = gap([1.0], [0.5])
    assert found.mean == 0.5 and math.isnan(found.half_width) and str(found) == "+0.5000"


def test_curves_are_means_of_windows_and_are_read_in_their_middle() -> None:
    steps = 1500
    plain = [torch.randn(steps) for _ in range(2)]
    coded = [plain[0] + torch.arange(steps), plain[1] - 1.0]
    lines = smoothed(coded, plain)
    assert lines.shape == (2, steps - 100 + 1)
    assert around(lines[0], 500, steps) == pytest.approx(499.5, abs=1e-2)  # the mean of 450 to 549
    assert around(lines[1], 500, steps) == pytest.approx(-1.0, abs=1e-5)
    for step in (10, steps):
        with pytest.raises(ValueError, match="too near"):
            around(lines[0], step, steps)


def test_a_gap_is_recorded_with_what_it_has() -> None:
    kept = {}

    class Chapter:
        def record(self, key: str, value: float | None, unit: str, **more: object) -> float | None:
            kept[key] = (value, unit, more)
            return value

    for key, found in (("a", Gap(0.5, 0.1, 3)), ("b", Gap(0.5, math.nan, 1)), ("c", Gap(math.nan, math.nan, 2))):
        record(Chapter(), key, found)  # type: ignore[arg-type]
    assert kept["a"] == (0.5, "nats", {"low": 0.4, "high": 0.6, "spread": "ci95", "n": 3})
    assert kept["b"] == (0.5, "nats", {}) and kept["c"] == (None, "nats", {})


@given(st.lists(finite, min_size=1, max_size=40))
def test_quartiles_are_those_of_numpy(samples: list[float]) -> None:
    expected = np.quantile(np.array(samples), [0.25, 0.5, 0.75])
    np.testing.assert_allclose(quartiles(samples), expected, rtol=1e-12, atol=1e-9 * max(map(abs, samples)))

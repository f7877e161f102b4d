"""Paired gaps against SciPy's own t test."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from tq.book.paired import gap


def test_gap_is_the_paired_t_interval() -> None:
    a, b = [1.0, 2.0, 3.5, 4.0], [0.9, 2.2, 3.1, 3.7]
    found, expected = gap(a, b), stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found.mean - found.half_width == pytest.approx(expected.low) and found.high == pytest.approx(expected.high)
    assert str(found) == f"{found.mean:+.4f} ± {found.half_width:.4f}"


def test_one_pair_has_no_interval() -> None:
    found = gap([1.0], [0.5])
    assert found.mean == 0.5 and math.isnan(found.half_width) and str(found) == "+0.5000"

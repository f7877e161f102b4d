"""One side of an equivalence test: against the other test, by simulation, and at its edges."""

import math

import numpy as np
import pytest

from tq.lab.equivalence import equivalence
from tq.lab.non_inferiority import non_inferiority

MARGIN = 0.003


def test_it_is_the_upper_side_of_the_two_one_sided_tests() -> None:
    losses, baseline = [0.001, 0.002, -0.001, 0.0015], [0.0] * 4
    one, two = non_inferiority(losses, baseline, MARGIN), equivalence(losses, baseline, MARGIN)
    assert one.high == pytest.approx(two.high) and one.mean == two.mean and one.p <= two.p
    assert one.holds == (one.high < MARGIN)


def test_better_runs_are_no_worse_but_not_equivalent() -> None:
    losses = [-0.006, -0.008, -0.005, -0.007]
    assert non_inferiority(losses, [0.0] * 4, MARGIN).holds and not equivalence(losses, [0.0] * 4, MARGIN).holds


def test_its_error_is_its_level_where_the_difference_is_the_margin() -> None:
    draws = np.random.default_rng(0).normal(MARGIN, 0.004, (4000, 16))
    share = np.mean([non_inferiority(list(row), [0.0] * 16, MARGIN).holds for row in draws])
    assert 0.035 <= share <= 0.065


def test_what_is_not_finite_is_worse() -> None:
    found = non_inferiority([0.0, math.nan], [0.0, 0.0], MARGIN)
    assert found.p == 1.0 and not found.holds
    assert not non_inferiority([0.004, 0.004], [0.0, 0.0], MARGIN).holds
    assert non_inferiority([0.002, 0.002], [0.0, 0.0], MARGIN).holds


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="margin must be positive, got 0"):
        non_inferiority([0.0, 0.0], [0.0, 0.0], 0.0)
    with pytest.raises(ValueError, match="losses: 1 pairs"):
        non_inferiority([0.0], [0.0], MARGIN)

"""The front against a search over all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.economics.pareto import front

points = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30)  # many ties


@given(points)
def test_front_holds_what_nobody_beats_and_nothing_else(found: list[tuple[int, int]]) -> None:
    time, cost = [p[0] for p in found], [p[1] for p in found]
    keep = front(time, cost)
    for i, (t, c) in enumerate(found):
        beaten = any(a <= t and b <= c and (a, b) != (t, c) for a, b in found)
        assert keep[i] == (not beaten)
    assert not found or keep.any()


def test_bad_points_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        front([1, 2], [1])
    with pytest.raises(ValueError, match="finite"):
        front([1, np.nan], [1, 2])

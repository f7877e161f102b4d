"""A codec at every place of a split model: the run goes on, fewer bytes travel, a wide codec changes little."""

from __future__ import annotations

import pytest

from tq.lab.layout_gaps import WHERE, gaps


@pytest.mark.parametrize("place", WHERE)
def test_a_codec_at_every_place(place: str) -> None:
    found = gaps({"place": place, "bits": [8], "seed": 0, "steps": 2})
    assert 0 < abs(found["gap"]["8"]) < 0.02  # not nothing, and not much
    assert 3.7 < found["times_fewer"]["8"] < 4.0

"""A codec at every place of a split model: the run goes on, fewer bytes travel, a wide codec changes little."""

from __future__ import annotations

import pytest

from tq.lab.layout_gaps import LR, WHERE, gaps, on_link, rate, together
from tq.lab.net import hosts

WHY = hosts.obstacle()


@pytest.mark.parametrize("places", together(), ids="-".join)
def test_a_codec_at_every_place(places: list[str]) -> None:
    found = gaps({"places": places, "bits": [8], "seed": 0, "steps": 2})
    for place in places:
        assert 0 < abs(found[place]["gap"]["8"]) < 0.02  # not nothing, and not much
        assert 3.7 < found[place]["times_fewer"]["8"] < 4.0


def test_places_of_one_layout() -> None:
    assert sorted(place for group in together() for place in group) == sorted(WHERE)
    with pytest.raises(ValueError, match="must have the same layout"):
        gaps({"places": ["weights", "tensor"], "bits": [8], "seed": 0, "steps": 2})
    assert rate(0, 100) == rate(50, 100) == LR and rate(75, 100) == LR / 2


@pytest.mark.skipif(WHY is not None, reason=f"no hosts: {WHY}")
def test_a_slow_link_makes_fewer_bytes_faster() -> None:
    found = on_link({"rate_mbit": 50, "places": ["tensor"], "bits": [4], "steps": 2})
    assert found is not None and min(found["tensor"]["fp32"]) > min(found["tensor"]["4"]) > 0

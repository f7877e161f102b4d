"""A codec at every place of a split model: the run goes on, fewer bytes travel, a wide codec changes little."""

from __future__ import annotations

import pytest

from tq.lab.layout_gaps import LR, WHERE, continued, gaps, on_link, rate, together
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
    assert rate(9, 100) == rate(50, 100) == LR / 2 and rate(75, 100) == rate(4, 100) == LR / 4


def test_training_goes_on_from_weights_of_one_process() -> None:
    found = continued({"bits": 8, "seed": 0, "before": 3, "steps": 2})
    losses = [value for name, value in found.items() if name.startswith("fp32")]
    assert max(losses[:-1]) - min(losses[:-1]) < 1e-4  # the layouts of the dense model are one model
    assert all(0 < abs(found[place]) < 0.02 for place in WHERE)
    assert max(losses) < 5.54  # below ln 256: the start was trained


@pytest.mark.skipif(WHY is not None, reason=f"no hosts: {WHY}")
def test_a_slow_link_makes_fewer_bytes_faster() -> None:
    found = on_link({"rate_mbit": 50, "places": ["tensor"], "bits": [4], "steps": 2})
    assert found is not None and min(found["tensor"]["fp32"]) > min(found["tensor"]["4"]) > 0

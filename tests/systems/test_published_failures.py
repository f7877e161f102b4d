"""Published failures: every prediction has its outcome, and a hit is a hit by its own tolerance."""

from __future__ import annotations

from dataclasses import replace

from tq.systems.published_failures import predictions


def test_all_predictions_have_outcomes():
    found = predictions()
    assert len(found) >= 10 and len({each.id for each in found}) == len(found)
    assert all(each.low <= each.value <= each.high for each in found)
    assert {each.quantity for each in found} >= {"interruptions", "mtbf_h", "checkpoint_bytes", "write_s"}


def test_tolerances():
    one = replace(predictions()[0], predicted=100.0, value=180.0, low=180.0, high=190.0, tolerance="factor 2")
    assert one.hit and not replace(one, low=201.0, high=210.0).hit
    assert replace(one, low=201.0, high=210.0, predicted=101.0).hit
    assert replace(one, low=50.0, high=51.0).hit and not replace(one, low=49.0, high=49.5).hit
    assert not replace(one, tolerance="5 %").hit and replace(one, tolerance="5 %", low=104.0, high=120.0).hit
    share = replace(one, predicted=0.9, tolerance="0.05", low=0.94, high=0.99)
    assert share.hit and not replace(share, low=0.96).hit

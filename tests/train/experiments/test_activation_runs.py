"""Runs that keep codes for the backward pass: exact before, the same with one seed, others with another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tq.train.experiments.activation_runs import KEPT, ActivationRun, train
from tq.train.experiments.paired_runs import fields

SHORT = ActivationRun("tiny", steps=4, batch=2, max_bytes=300_000, evaluated=1, shared=2)


def _trained(**changes: Any) -> dict[str, Any]:
    return train(fields(replace(SHORT, **changes)))


def test_a_pair_shares_its_start_and_parts_with_the_codes() -> None:
    exact, coded, again = _trained(), _trained(kept="4 bits"), _trained(kept="4 bits")
    other = _trained(kept="4 bits", code_seed=5)
    assert torch.equal(exact["losses"][:3], coded["losses"][:3])  # the third is that before the first coded update
    assert not torch.equal(exact["losses"], coded["losses"])
    assert coded["valid"] == again["valid"] != other["valid"]
    assert abs(coded["valid"] - exact["valid"]) < 0.05


@pytest.mark.parametrize("kept", KEPT)
def test_what_is_kept_is_as_small_as_its_bits(kept: str) -> None:
    found = _trained(kept=kept)
    low, high = {"exact": (1, 1), "recompute": (0.5, 0.8), "2 bits": (0.05, 0.15)}.get(kept, (0.08, 0.25))
    assert low <= found["kept"] <= high and len(found["losses"]) == 4


def test_fields_are_plain_and_wrong_ones_are_refused() -> None:
    assert fields(SHORT) == {
        "preset": "tiny", "steps": 4, "batch": 2, "max_bytes": 300_000, "evaluated": 1, "shared": 2
    }  # fmt: skip
    for wrong in ({"kept": "3 bits"}, {"workers": 2}, {"shared": 4}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            _trained(**wrong)

"""Pairs of runs that differ by chance alone: size nought is the run itself, and a last digit changes it."""

from __future__ import annotations

from tq.lab.layout_gaps import gaps
from tq.lab.layout_null import perturbed


def test_no_change_is_the_run_itself_and_a_small_one_is_not() -> None:
    fp32 = gaps({"places": ["tensor"], "bits": [8], "seed": 1, "steps": 2})["fp32"]
    task = {"place": "tensor", "seed": 1, "steps": 2, "draws": 2}
    assert perturbed(task | {"size": 0.0}) == [fp32, fp32]
    one, other = perturbed(task | {"size": 1e-6})
    assert 0 < abs(one - fp32) < 0.01 and one != other

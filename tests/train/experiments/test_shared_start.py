"""Runs that share their start are the same up to there, and go on by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tq.train.experiments import paired_runs
from tq.train.experiments.paired_runs import Run, fields
from tq.train.experiments.shared_start import go_on, train

RUN = Run(preset="tiny", steps=8, batch=2, workers=1, max_bytes=200_000)


def test_the_start_is_shared_and_the_rest_is_not() -> None:
    plain, coded = ({**fields(RUN), **what, "shared": 5} for what in ({}, {"state": [4, 8]}))
    a, b = train(plain), train(coded)
    whole = paired_runs.train(fields(RUN))
    assert torch.equal(a["losses"][:5], whole["losses"][:5]) and torch.equal(a["losses"][:6], b["losses"][:6])
    assert len(a["losses"]) == 8 and not torch.equal(a["losses"][7:], b["losses"][7:])
    assert a["state_bytes"] > 7 and b["state_bytes"] < 2.5
    assert train(plain)["valid"] == a["valid"]


def test_noise_disturbs_the_shared_weights_only() -> None:
    a, b = (train({**fields(replace(RUN, noise=noise)), "shared": 5}) for noise in (0.0, 1e-3))
    assert torch.equal(a["losses"][:5], b["losses"][:5]) and not torch.equal(a["losses"][5:], b["losses"][5:])


def test_two_disturbances_of_one_run_differ_by_their_seed() -> None:
    moved = replace(RUN, noise=1e-3)
    a, b, again = (train({**fields(replace(moved, code_seed=s)), "shared": 5}) for s in (6, 7, 6))
    assert a["valid"] == again["valid"] != b["valid"] and abs(a["valid"] - b["valid"]) < 0.05


def test_errors() -> None:
    with pytest.raises(ValueError, match="workers must be 1, got 4"):
        train({**fields(replace(RUN, workers=4)), "shared": 2})
    trainer = paired_runs.trainer(RUN)
    with pytest.raises(ValueError, match="steps must be 0 to 7, got 8"):
        go_on(trainer, RUN, 8)
    trainer.train(1, progress=False)
    with pytest.raises(ValueError, match="the trainer has done 1 steps"):
        go_on(trainer, RUN, 2)

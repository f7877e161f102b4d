"""Losses of planned runs: seeds are shared, plans are followed in training alone, the lowest peak is the lower one."""

from __future__ import annotations

from unittest import mock

import pytest

from tq.lab import plan_losses as study
from tq.train.planned.execution import PlannedActivations

leave = PlannedActivations.__exit__

SHAPE = dict(layers=2, hidden=64, heads=2, vocab=256, seq=64)
TASK = dict(shape=SHAPE, steps=3, batch=4, seed=0, most_text=200_000, evaluated=2)


def test_arms_of_a_seed_differ_by_their_plan_alone() -> None:
    runs = {arm: study.trained({**TASK, "arm": arm}) for arm in study.ARMS}
    whole = runs.pop(study.KEEP)
    assert whole == study.trained({**TASK, "arm": study.KEEP}) and whole["kept"] == whole["peak"] == 1
    assert runs[study.LOWEST]["peak"] <= runs[study.TENTH]["peak"] and runs[study.TENTH]["kept"] <= 0.1
    for run in runs.values():
        assert run["valid"] == pytest.approx(whole["valid"], abs=0.05)


def test_every_training_step_follows_the_plan_and_held_out_text_does_not() -> None:
    entered = []
    with mock.patch.object(PlannedActivations, "__exit__", lambda self, *raised: entered.append(leave(self, *raised))):
        study.trained({**TASK, "arm": study.LOWEST})
    calibration = 2  # plans that the prices are calibrated with, each followed once
    assert len(entered) == TASK["steps"] + calibration


def test_another_seed_is_another_run() -> None:
    assert study.trained({**TASK, "arm": study.KEEP, "seed": 1})["valid"] != study.trained(
        {**TASK, "arm": study.KEEP}
    )["valid"]  # fmt: skip

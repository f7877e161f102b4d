"""A run that is looked at is the same run, and its looks are what it was at those steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tq.train.experiments import paired_runs, simulated_sites
from tq.train.experiments.paired_runs import Run, fields
from tq.train.experiments.simulated_sites import SiteRun
from tq.train.experiments.watched_runs import train

SHORT = Run("tiny", hidden=32, steps=8, batch=2, workers=2, max_bytes=300_000, evaluated=2)


def test_looks_do_not_change_a_run() -> None:
    coded = replace(SHORT, variant="published-v3", warmup=2)
    plain = paired_runs.train(fields(coded))
    found = train({**fields(coded), "look": 3, "batches": 1})
    assert found["steps"] == [3, 6, 8] and found["valid_end"] == plain["valid"] and found["diverged"] is None
    assert found["drift"][0] > 0 and found["drift"][-1] == plain["drift"] > found["drift"][0]
    assert found["trained"][0] == pytest.approx(sum(plain["losses"][:3].tolist()) / 3)
    assert len(found["valid"]) == 3 and found["valid"][-1] < found["valid"][0]


def test_sites_are_looked_at_alike() -> None:
    run = SiteRun("tiny", hidden=32, steps=8, batch=2, warmup=2, every=3, max_bytes=300_000, evaluated=2)
    plain = simulated_sites.train(fields(run))
    found = train({**fields(run), "look": 4, "batches": 1, "sites": True})
    assert found["steps"] == [4, 8] and found["valid_end"] == plain["valid"] and found["drift"] == [0.0, 0.0]


def test_a_run_that_diverges_says_where() -> None:
    found = train({**fields(replace(SHORT, lr=1e30)), "look": 2, "batches": 1})
    assert math.isnan(found["valid_end"]) and found["diverged"] < 8

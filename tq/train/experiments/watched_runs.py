"""Runs that are looked at on their way: held-out loss and distance of the replicas every so many steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tq.train.experiments import paired_runs
from tq.train.experiments.paired_runs import Run
from tq.train.experiments.simulated_sites import SiteRun, Sites
from tq.train.experiments.simulated_workers import Workers
from tq.train.model.loop import Trainer


def train(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A run of several workers, by the fields of ``Run`` that are not the default.

    task: also "look", steps between two looks, and "batches" of held-out text at each; "sites": True makes it one of
    ``SiteRun``.

    Returns, each a list as long as there were looks: steps; valid in nats a token; trained, mean of the training losses
    since the last look; drift between replicas. And valid_end, of as many batches as the run asks for, NaN if the run
    diverged; diverged: the step, or None.
    """
    own = {k: v for k, v in task.items() if k not in ("look", "batches", "sites")}
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in own.items()}
    run = SiteRun(**given) if task.get("sites") else Run(**given)
    trainer: Trainer = Sites(run, device) if isinstance(run, SiteRun) else paired_runs.trainer(run, device)
    looks: dict[str, Any] = {"steps": [], "valid": [], "trained": [], "drift": []}
    diverged = None
    try:
        while trainer.steps_done < run.steps:
            losses = trainer.train(min(run.steps, trainer.steps_done + task["look"]), progress=False)
            looks["steps"].append(trainer.steps_done)
            looks["valid"].append(trainer.evaluate(task["batches"]))
            looks["trained"].append(sum(losses) / len(losses))
            looks["drift"].append(trainer.drift() if isinstance(trainer, Workers) else 0.0)
    except FloatingPointError:
        diverged = trainer.steps_done
    valid = math.nan if diverged is not None else trainer.evaluate(run.evaluated)
    return looks | {"valid_end": valid, "diverged": diverged}


def long_runs() -> dict[str, dict[str, Any]]:
    """Tasks of ``train`` by name: a hundred thousand steps of a model of 0.1 million parameters, two replicas.

    The rate is a quarter of what suits 250 steps, as a run this long stands at it for long. A pair "null" differs from
    its run at four bits by the codes' seed alone.
    """
    long = Run("tiny", hidden=64, steps=100_000, batch=2, workers=2, lr=1e-3, max_bytes=48_000_000)
    four: dict[str, Any] = {"variant": "gradient", "warmup": 50}
    rules = {
        "fp32": {}, "4-bits": four, "null": four | {"code_seed": 1000}, "published": four | {"variant": "published-v3"},
    }  # fmt: skip
    extra = {"look": 1000, "batches": 16}
    return {
        f"100k-{rule}-0": paired_runs.fields(replace(long, **what)) | extra for rule, what in rules.items()
    }

"""Runs that share their start, so that what parts them is what they differ in.

Early in training, where the learning rate is high and the model knows nothing, any disturbance throws a run on another
path, and what it gains or loses by that luck stays to its end. So every run here goes on from the same weights, those
that AdamW with fp32 states has reached after some steps, with an optimizer of its own that starts anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tq.train.experiments import paired_runs
from tq.train.experiments.paired_runs import Run
from tq.train.model.corpus import Corpus, load
from tq.train.model.loop import Trainer


def go_on(trainer: Trainer, run: Run, steps: int, noise: float = 0.0) -> Trainer:
    """Puts a trainer that has done nothing where ``run`` with exact means and fp32 states is after ``steps`` steps.

    noise: relative disturbance of these weights, drawn from the run's ``code_seed``, or its seed. The trainer's
    optimizer has seen none of the steps. ValueError for a trainer that is on its way, or for steps that the run does
    not have.
    """
    if trainer.steps_done:
        raise ValueError(f"the trainer has done {trainer.steps_done} steps; only one that has done none can go on")
    if not 0 <= steps < trainer.config.steps:
        raise ValueError(f"steps must be 0 to {trainer.config.steps - 1}, got {steps}")
    first = paired_runs.trainer(replace(run, variant="exact", state=None, noise=0.0), trainer.device, trainer.corpus)
    first.train(steps, progress=False)
    trainer.model.load_state_dict(first.model.state_dict())
    if noise:
        generator = torch.Generator().manual_seed(run.seed if run.code_seed is None else run.code_seed)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(1 + noise * torch.randn(p.shape, generator=generator).to(p.device))
    trainer.losses = list(first.losses)
    return trainer


def train(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A run of ``paired_runs.Run`` fields with one worker, and "shared": steps that it shares with others of its seed.

    Returns losses (float32 [steps done]), those of the shared steps included; valid in nats a token, NaN if it
    diverged; state bytes a parameter.
    """
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in task.items() if k != "shared"}
    run = Run(**given)
    if run.workers != 1:
        raise ValueError(f"workers must be 1, got {run.workers}: simulated workers start together")
    corpus: Corpus = load("stdlib", max_bytes=run.max_bytes)
    trained = go_on(paired_runs.trainer(replace(run, noise=0.0), device, corpus), run, task["shared"], run.noise)
    valid = float("nan")
    try:
        trained.train(progress=False)
        valid = trained.evaluate(run.evaluated)
    except FloatingPointError:
        pass
    state = getattr(trained.optimizer, "state_nbytes", 0) / sum(p.numel() for p in trained.model.parameters())
    return {"losses": torch.tensor(trained.losses), "valid": valid, "state_bytes": state}

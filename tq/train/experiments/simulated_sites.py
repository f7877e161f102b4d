"""Sites that train alone and agree every H steps, all in one process: DiLoCo, of which only the wire is missing.

The first steps average gradients over the sites in every step, so that runs of one seed share their start.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tq.quant.codec import Codec
from tq.train.collectives import Codecs
from tq.train.diloco import DiLoCo, agree_together
from tq.train.experiments import paired_runs
from tq.train.experiments.paired_runs import Run
from tq.train.model.loop import TrainConfig, Trainer


@dataclass(frozen=True)
class SiteRun(Run):
    """workers: the sites, a replica each, which share the batch; warmup: steps that average gradients in fp32 first.

    every: H, steps between two agreements, which divides the steps after the warm-up; 0: gradients are averaged to the
    end. outer: learning rate and momentum of the outer step. coded: bits of the two phases that the pseudo-gradients
    travel in; None: fp32. feedback: what coding lost is added to the next one, and scales are least squares.
    """

    workers: int = 2
    warmup: int = 50
    every: int = 32
    outer: tuple[float, float] = (0.7, 0.9)
    coded: tuple[int, int] | None = None
    feedback: bool = False


class Sites(Trainer):
    """The replicas of a run, with an AdamW each. ``losses`` holds the mean over the sites, ``model`` is the first."""

    def __init__(self, run: SiteRun, device: torch.device | str = "cpu") -> None:
        if run.workers < 2 or run.batch % run.workers:
            raise ValueError(f"workers must be 2 at least and divide batch={run.batch}, got {run.workers}")
        if run.every and (run.steps - run.warmup) % run.every:
            raise ValueError(f"every must divide steps - warmup = {run.steps - run.warmup}, got {run.every}")
        first = paired_runs.trainer(replace(run, workers=1, variant="local", warmup=0), device)
        config = TrainConfig(run.steps, run.batch, lr=run.lr, grad_clip=1.0, seed=run.seed)
        copies = [copy.deepcopy(first.model) for _ in range(run.workers - 1)]
        super().__init__(first.model, first.corpus, config, device)
        others = [Trainer(model, first.corpus, config, device) for model in copies]
        self.run, self.outer = run, list[DiLoCo]()
        self.replicas = [self.model, *(other.model for other in others)]
        self.optimizers = [self.optimizer, *(other.optimizer for other in others)]

    def step(self) -> float:
        """One step of every site, and what they agree upon after it; returns the mean loss before it."""
        shares = [t.chunk(len(self.replicas)) for t in self._batch(self.steps_done)]
        losses = []
        for model, optimizer, ids, targets in zip(self.replicas, self.optimizers, *shares, strict=True):
            optimizer.zero_grad(set_to_none=True)
            losses.append(self._backward(model, ids, targets))
        alone = self.run.every > 0 and self.steps_done >= self.run.warmup
        if not alone:
            self._average_gradients()
        elif not self.outer:
            self.outer = [self._agreement(model) for model in self.replicas]  # from the weights that all have now
        for model, optimizer, loss in zip(self.replicas, self.optimizers, losses, strict=True):
            self._finite_norm(model, loss)
            self._schedule(optimizer)
            optimizer.step()
        agree_together(self.outer)
        self.losses.append(sum(losses) / len(losses))
        return self.losses[-1]

    @torch.no_grad()
    def _average_gradients(self) -> None:
        for same in zip(*(model.parameters() for model in self.replicas), strict=True):
            mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
            for p in same:
                p.grad = mean.clone()

    def _agreement(self, model: torch.nn.Module) -> DiLoCo:
        run = self.run
        seed = run.seed if run.code_seed is None else run.code_seed
        scale = "mse" if run.feedback else "unbiased"
        lr, momentum = run.outer
        codecs: Codecs | None = None
        if run.coded is not None:
            codecs = Codec(run.coded[0], run.block, scale, seed=seed), Codec(run.coded[1], run.block, scale, seed=seed)
        return DiLoCo(model.parameters(), run.every, codecs, lr=lr, momentum=momentum, feedback=run.feedback)


def train(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A whole run, by the fields of ``SiteRun`` that are not the default.

    Returns:
        losses (float32 [steps done]) and valid in nats a token, valid NaN if the run diverged; fewer_bytes: what
        averaging gradients in fp32 sends in the steps after the warm-up, over what a site sent in them.
    """
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in task.items()}
    run = SiteRun(**given)
    trained, valid = Sites(run, device), math.nan
    try:
        trained.train(progress=False)
        valid = trained.evaluate(run.evaluated)
    except FloatingPointError:
        pass
    elements = sum(p.numel() for p in trained.model.parameters())
    share = 2 * (run.workers - 1) / run.workers
    plain = 4 * share * elements * max(0, trained.steps_done - run.warmup)
    sent = trained.outer[0].bytes_sent if trained.outer else plain
    return {"losses": torch.tensor(trained.losses), "valid": valid, "fewer_bytes": plain / sent if sent else 1.0}

"""Several data-parallel workers in one process: a replica of the model each, and only the wire is missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from tq.train.model.corpus import Corpus
from tq.train.model.gpt import GPT
from tq.train.model.loop import TrainConfig, Trainer
from tq.train.optim import TurboQuantAdamW, simulate_ranks, step_together


class Workers(Trainer):
    """A trainer whose batch is shared by ``workers`` replicas, which exchange what their optimizers ask for.

    Arguments:
        model: the first replica; the others are copies of it.
        workers: must divide ``config.batch`` into shares that ``config.accumulate`` divides.
        optimizer: makes the optimizer of one replica from its parameter groups. It also clips (``max_norm``), as only
            it knows the gradient of all, so ``config.grad_clip`` must be None.

    ``losses`` holds the mean over the workers. float16 is refused: each worker would need a loss scale of its own.
    """

    optimizer: TurboQuantAdamW

    def __init__(
        self,
        model: GPT,
        corpus: Corpus,
        config: TrainConfig,
        workers: int,
        optimizer: Callable[[list[dict[str, Any]]], TurboQuantAdamW],
        device: torch.device | str = "cpu",
    ):
        if not isinstance(workers, int) or workers < 1 or config.batch % (workers * config.accumulate):
            raise ValueError(
                f"workers times accumulate={config.accumulate} must divide batch={config.batch}, got {workers!r}"
            )
        if config.grad_clip is not None:
            raise ValueError(f"config.grad_clip must be None (the optimizer clips), got {config.grad_clip}")
        if config.autocast == torch.float16:
            raise ValueError("config.autocast must be torch.bfloat16 or None with simulated workers, got torch.float16")
        copies = [copy.deepcopy(model) for _ in range(workers - 1)]
        super().__init__(model, corpus, config, device, optimizer)
        others = [Trainer(replica, corpus, config, device, optimizer) for replica in copies]
        self.replicas = [self.model, *(other.model for other in others)]
        self._forwards = [self.forward, *(other.forward for other in others)]
        self.optimizers = [self.optimizer, *(other.optimizer for other in others)]
        if not all(isinstance(each, TurboQuantAdamW) for each in self.optimizers):
            raise TypeError(f"optimizer must make a TurboQuantAdamW, got {type(self.optimizer).__name__}")
        simulate_ranks(self.optimizers)  # type: ignore[arg-type]

    def step(self) -> float:
        """One update of all replicas; returns the mean loss before it."""
        shares = [t.chunk(len(self.replicas)) for t in self._batch(self.steps_done)]
        losses = []
        for forward, optimizer, ids, targets in zip(self._forwards, self.optimizers, *shares, strict=True):
            optimizer.zero_grad(set_to_none=True)
            losses.append(self._backward(forward, ids, targets))
            self._schedule(optimizer)
        step_together(self.optimizers)  # type: ignore[arg-type]
        self.losses.append(sum(losses) / len(losses))
        return self.losses[-1]

    @torch.no_grad()
    def drift(self) -> float:
        """Largest distance of a replica's weights from the first's, relative to the length of those."""
        first = torch.cat([p.flatten() for p in self.model.parameters()])
        distances = [
            (torch.cat([p.flatten() for p in replica.parameters()]) - first).norm() for replica in self.replicas[1:]
        ]
        return max((d / first.norm()).item() for d in distances) if distances else 0.0

    def state_dict(self) -> dict[str, Any]:
        """As the trainer's, and every worker's model and optimizer."""
        others = zip(self.replicas[1:], self.optimizers[1:], strict=True)
        workers = [{"model": model.state_dict(), "optimizer": optimizer.state_dict()} for model, optimizer in others]
        return {**super().state_dict(), "workers": workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the trainer's; another number of workers raises ``ValueError``."""
        super().load_state_dict(state)
        for model, optimizer, kept in zip(self.replicas[1:], self.optimizers[1:], state["workers"], strict=True):
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])

    def _run(self) -> dict[str, Any]:
        return {**super()._run(), "workers": len(self.replicas)}

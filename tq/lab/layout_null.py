"""What chance alone does to a pair of runs: the layouts of ``tq.lab.layout_gaps`` without a codec, from first weights
that differ in their last digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tq.lab import layout_gaps as gaps
from tq.train import chunks
from tq.train.crew import crew
from tq.train.split import Job, Plan


def on_rank(folder: Path, place: str, seed: int, steps: int, size: float, draws: int) -> list[float]:
    """On a rank of a crew: loss in nats after each run."""
    plan, data, found = Plan(**gaps.WHERE[place]), gaps._data(), []
    mixture = gaps.MIXTURE if plan.ep > 1 else None
    for draw in range(draws):
        noise = torch.Generator().manual_seed(10_000 * (draw + 1) + seed)
        start = {
            name: x * (1 + size * torch.randn(x.shape, generator=noise)) if x.is_floating_point() else x
            for name, x in chunks.model(gaps.CONFIG, seed, mixture).state_dict().items()
        }
        job = Job(plan, gaps.CONFIG, mixture, seed=seed, lr=gaps.LR, start=start)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            job.backward(*gaps._batch(data, generator))
            job.update()
        found.append(gaps._held_out(job, data))
    return found


def perturbed(task: dict[str, Any], device: str = "cpu") -> list[float]:
    """Loss in nats of each of ``draws`` runs as in ``layout_gaps.gaps`` without a codec, on the same batches.

    Args:
        task: place (its layout), seed, steps, size (standard deviation of the relative change of a first weight; 0 is
            that run itself), draws.
        device: "cpu".
    """
    found: list[float] = crew("tq.lab.layout_null:on_rank", 2, 900.0, **task)[0]
    return found

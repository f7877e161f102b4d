"""What a codec costs at each place of a split model: paired runs on real ranks, with and without it, and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq.train import chunks
from tq.train.crew import crew
from tq.train.model.corpus import load
from tq.train.model.gpt import GPTConfig
from tq.train.split import Job, Plan
from tq.train.traffic import counted

CONFIG = GPTConfig(layers=4, hidden=128, heads=4, vocab=256, seq=64)
MIXTURE = chunks.Mixture(experts=4, chosen=2, width=256)
SEQUENCES, LR = 16, 2e-3
#: For each place of ``tq.train.split.PLACES`` the layout of two ranks that has it.
WHERE: dict[str, dict[str, Any]] = {
    "gradients": {"dp": 2, "zero": 2},
    "weights": {"dp": 2, "zero": 2},
    "tensor": {"tp": 2},
    "forward": {"pp": 2, "micro": 2},
    "backward": {"pp": 2, "micro": 2},
    "experts": {"dp": 2, "ep": 2},
}


def _batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    start = torch.randint(0, len(data) - CONFIG.seq - 1, (SEQUENCES,), generator=generator)
    tokens = torch.stack([data[s : s + CONFIG.seq + 1] for s in start.tolist()]).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _trained(place: str, bits: int | None, seed: int, steps: int, data: Tensor) -> dict[str, Any]:
    plan = Plan(**WHERE[place], bits={} if bits is None else {place: bits})
    job = Job(plan, CONFIG, MIXTURE if plan.ep > 1 else None, seed=seed, lr=LR)
    generator, sent = torch.Generator().manual_seed(seed), {}
    for step in range(steps):
        if step == 1:
            with counted() as traffic:
                job.backward(*_batch(data, generator))
            sent = traffic.table()
        else:
            job.backward(*_batch(data, generator))
        job.update()
    held_out, losses = torch.Generator().manual_seed(10_000), []  # the same batches for all runs
    for _ in range(8):
        losses.append(job.mean_loss(job.backward(*_batch(data, held_out))))
    digest = sum(float(p.detach().double().sum()) for _, p in job.named()) if plan.dp > 1 and plan.ep == 1 else 0.0
    return {"loss": sum(losses) / len(losses), "sent": sent, "digest": digest}


def on_rank(folder: Path, place: str, bits: list[int], seed: int, steps: int) -> dict[str, Any]:
    """On a rank of a crew: one run without a codec and one of each width."""
    data = load("stdlib", max_bytes=1_000_000).train
    data = torch.as_tensor(data)
    return {str(b): _trained(place, b, seed, steps, data) for b in [None, *bits]}


def _summed(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Bytes by operation over all ranks."""
    return {key: sum(each.get(key, 0.0) for each in ranks) for key in {key for each in ranks for key in each}}


def _times(place: str, before: dict[str, float], after: dict[str, float]) -> float:
    """How many times fewer bytes the place itself sends; what the layout sends elsewhere is left out."""
    if place == "gradients":  # codes travel by an all-to-all and are summed where they arrive
        return before["reduce-scatter 2"] / after["all-to-all 2"]
    if place == "tensor":  # codes travel as messages; the sums at both ends of the model stay in fp32
        return (before["all-reduce 2"] - after["all-reduce 2"]) / after["send 2"]
    if place in ("forward", "backward"):  # the other direction stays in fp32
        return before["send 2"] / 2 / (after["send 2"] - before["send 2"] / 2)
    operation = {"weights": "all-gather 2", "experts": "all-to-all 2"}[place]
    return before[operation] / after[operation]


def gaps(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Loss gaps in nats and bytes saved of one place and seed, by width.

    Args:
        task: place (of ``WHERE``), bits (a list), seed, steps.
        device: "cpu".
    """
    found = crew("tq.lab.layout_gaps:on_rank", 2, 900.0, **task)
    sent = {bits: _summed([each[bits]["sent"] for each in found]) for bits in found[0]}
    return {
        "fp32": found[0]["None"]["loss"],
        "gap": {str(b): found[0][str(b)]["loss"] - found[0]["None"]["loss"] for b in task["bits"]},
        "times_fewer": {str(b): _times(task["place"], sent["None"], sent[str(b)]) for b in task["bits"]},
    }

"""Deep gradient compression beside ours and DiLoCo: loss gaps at their bytes, and its messages on real ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tq.lab.ranks import together
from tq.train.experiments import paired_runs, simulated_sites
from tq.train.experiments.paired_runs import Run
from tq.train.experiments.simulated_workers import Workers
from tq.train.model.corpus import load
from tq.train.model.gpt import GPT, PRESETS
from tq.train.model.loop import TrainConfig
from tq.train.optim import TurboQuantAdamW
from tq.train.schemes.sparse import SGD, SHARE, chosen, dgc, pack, unpack

CLIP = 1.0  # of the gradient of all ranks; a rank of DGC clips at this over sqrt(n)
SGD_BETAS = (0.9, 0.95)
ARMS = ("exact", "ours", "dgc", "diloco", "sgd", "dgc-sgd")


@dataclass(frozen=True)
class SparseRun(Run):
    """A run of one of ``ARMS``. share: that DGC sends after its ``warmup``, in which DiLoCo averages every step.
    every: H of DiLoCo, whose pseudo-gradients travel in ``bits``."""

    preset: str = "tiny"
    hidden: int | None = 64
    steps: int = 400
    arm: str = "exact"
    share: float = SHARE
    warmup: int = 40
    every: int = 24
    max_bytes: int = 2_000_000


def _workers(run: SparseRun) -> Workers:
    """DGC and what it is compared with under SGD: SGD has no decay of weights."""
    plain = run.arm == "sgd"
    scheme = SGD if plain else dgc(run.share, run.warmup, "sgd" if run.arm == "dgc-sgd" else "adamw")
    settings = TrainConfig(run.steps, run.batch, lr=run.lr, grad_clip=None, seed=run.seed)

    def optimizer(groups: list[dict[str, Any]]) -> TurboQuantAdamW:
        if run.arm != "dgc":
            groups = [group | {"weight_decay": 0.0} for group in groups]
        limit = CLIP if plain else CLIP / run.workers**0.5
        betas = settings.betas if run.arm == "dgc" else SGD_BETAS
        return TurboQuantAdamW(groups, run.lr, betas, settings.eps, variant=scheme, max_norm=limit, warmup=0)

    config = PRESETS[run.preset]
    if run.hidden is not None:
        config = replace(config, hidden=run.hidden, heads=run.hidden // 32)
    corpus = load("stdlib", max_bytes=run.max_bytes)
    return Workers(GPT(config, run.seed), corpus, settings, run.workers, optimizer)


def train(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A whole run, by the fields of ``SparseRun`` that are not the default.

    Returns:
        valid: held-out loss in nats per token, NaN where the run was no longer finite. fewer, fewer_after: bytes of
        fp32 all-reduces over those that were sent, of the whole run and of the steps after the warm-up.
    """
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in task.items()}
    run = SparseRun(**given)
    if run.arm not in ARMS:
        raise ValueError(f"arm must be one of {', '.join(ARMS)}, got {run.arm!r}")
    shared = {key: value for key, value in asdict(run).items() if key in asdict(Run())}
    if run.arm in ("exact", "ours"):
        shared |= {"variant": "exact" if run.arm == "exact" else "gradient", "warmup": 0}
        ended = paired_runs.train(shared)
        fewer = 32 / ended["bits"]
        return {"valid": ended["valid"], "fewer": fewer, "fewer_after": fewer}
    if run.arm == "diloco":
        ended = simulated_sites.train(shared | {"every": run.every, "coded": run.bits, "warmup": run.warmup})
        after, alone = ended["fewer_bytes"], run.steps - run.warmup
        return {"valid": ended["valid"], "fewer": run.steps / (run.warmup + alone / after), "fewer_after": after}
    return _train_workers(run)


def _train_workers(run: SparseRun) -> dict[str, Any]:
    trained, valid = _workers(run), math.nan
    optimizer, before = trained.optimizer, 0.0
    try:
        trained.train(run.warmup, progress=False)
        before = optimizer.bytes_sent
        trained.train(progress=False)
        valid = trained.evaluate(run.evaluated)
    except FloatingPointError:
        pass
    step = 8 * (run.workers - 1) / run.workers * sum(p.numel() for p in trained.model.parameters())
    done = trained.steps_done
    return {
        "valid": valid, "fewer": step * done / optimizer.bytes_sent,
        "fewer_after": step * max(1, done - run.warmup) / max(1.0, optimizer.bytes_sent - before),
    }  # fmt: skip


def arms(base: SparseRun) -> dict[str, SparseRun]:
    """All arms of a comparison."""
    return {name: replace(base, arm=name) for name in ARMS}


def _gathered(folder: Path, numel: int, share: float) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    message = pack(x, chosen(x, [torch.Size((1, numel))], share))
    inbox = [torch.empty_like(message) for _ in range(ranks)]
    dist.all_gather(inbox, message)
    mean = torch.stack([unpack(each, numel) for each in inbox]).mean(0)
    return [float((ranks - 1) * message.numel()), float(mean.double().square().sum())]


def gathered(ranks: int, numel: int, share: float = SHARE) -> dict[str, Any]:
    """DGC's messages, packed and gathered on processes: payload bytes that a rank sends, and whether all decode the
    same mean."""
    found = together(_gathered, ranks, numel=numel, share=share)
    return {"bytes": found[0][0], "agree": all(each == found[0] for each in found)}

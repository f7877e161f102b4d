"""How long a real barrier takes when every rank is late by chance: what the slowest of n costs, on processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from tq.lab.ranks import together
from tq.systems.synchronisation import KINDS

LEAST = 5.0  # standard deviations of normal jitter between its mean and nothing: a rank cannot be early


def drawn(kind: str, spread_s: float, ranks: int, steps: int, seed: int = 0) -> NDArray[np.float64]:
    """[steps, ranks] seconds of work with this standard deviation: normal around five of them, or exponential.

    "staggered" is a control: one rank after the other, ``spread_s`` apart, in an order that is drawn for each step. All
    but the last wait already when it comes, as they do where times are drawn, and when it comes is known.
    """
    if kind not in (*KINDS, "staggered"):
        raise ValueError(f"kind must be one of {', '.join(KINDS)} or staggered; got {kind!r}")
    draw = np.random.default_rng(seed)
    if kind == "staggered":
        return spread_s * (1 + draw.permuted(np.tile(np.arange(ranks), (steps, 1)), axis=1))
    if kind == "normal":
        return np.maximum(draw.normal(LEAST * spread_s, spread_s, (steps, ranks)), 0.0)
    return draw.exponential(spread_s, (steps, ranks))


def _steps(folder: Path, kind: str, spread_s: float, steps: int, seed: int) -> list[list[float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = drawn(kind, spread_s, ranks, steps, seed)[:, rank]
    dist.barrier()
    ends, own = [time.perf_counter()], []
    for work in mine:
        time.sleep(max(0.0, ends[-1] + float(work) - time.perf_counter()))
        own.append(time.perf_counter() - ends[-1])
        dist.barrier()
        ends.append(time.perf_counter())
    return [np.diff(ends).tolist(), own]


def measure(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Steps of ranks that sleep for ``drawn`` times and then meet at a barrier of gloo.

    Args:
        task: ``ranks``, ``steps``, ``kind``, ``spread_s`` and ``seed`` of ``drawn``.

    Returns:
        mean_s of a step over steps and ranks, its standard error over steps, slowest_s: the mean of the slowest drawn
        time, which a barrier without cost would take, and own_s: what the work of the first rank took, step by step.
    """
    settings = {key: task[key] for key in ("kind", "spread_s", "steps", "seed")}
    of_ranks = together(_steps, task["ranks"], **settings)
    found = np.array([steps for steps, _ in of_ranks]).mean(0)
    work = drawn(task["kind"], task["spread_s"], task["ranks"], task["steps"], task["seed"])
    return {
        "mean_s": float(found.mean()), "error_s": float(found.std(ddof=1) / len(found) ** 0.5),
        "slowest_s": float(work.max(1).mean()), "own_s": of_ranks[0][1],
    }  # fmt: skip

"""What the ranks of the tests of ``netlab`` do: functions that a crew calls, and a job that loses a rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tq import Codec
from tq.train.collectives import GroupError, all_reduce


def total(value: float) -> dict[str, Any]:
    x = torch.tensor([float(value) if dist.get_rank() == 0 else 0.0])
    dist.all_reduce(x)
    return {"sum": x.item(), "rank": dist.get_rank()}


def fail(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("not on this one")


def reduce(numel: int, times: int) -> str:
    try:
        for step in range(times):
            all_reduce(torch.ones(numel), Codec(4), step=step)
    except GroupError as error:
        return str(error)
    return "done"


def job(folder: Path) -> None:
    """Counts up with a checkpoint after each step; the first time, rank 1 dies on its way."""
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), folder / f"checkpoint-{dist.get_rank()}"
    start, count = (float(x) for x in saved.read_text().split()) if saved.exists() else (0.0, 0.0)
    agreed = torch.tensor([start])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    count = count if start == agreed.item() else 3.0 * agreed.item()
    for step in range(int(agreed.item()), 10):
        if rank == 1 and step == 5 and not (folder / "died").exists():
            (folder / "died").touch()
            os._exit(9)
        x = torch.full((1000,), float(2 * rank + 2))
        all_reduce(x, Codec(8), step=step)
        count += round(x.mean().item(), 2)
        saved.write_text(f"{step + 1} {count}")
    (folder / f"sum-{rank}").write_text(str(round(count, 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    job(Path(sys.argv[1]))

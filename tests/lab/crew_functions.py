"""What the ranks of the tests do: functions that a crew calls, and a job that loses a rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tq import Codec
from tq.train.collectives import GroupError, all_reduce
from tq.train.experiments.ranks import ParallelTrainer
from tq.train.model.corpus import load
from tq.train.model.gpt import GPT, PRESETS
from tq.train.model.loop import TrainConfig


def total(value: float) -> dict[str, Any]:
    x = torch.tensor([float(value) if dist.get_rank() == 0 else 0.0])
    dist.all_reduce(x)
    return {"sum": x.item(), "rank": dist.get_rank()}


def fail(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("not on this one")


def rest(seconds: float) -> None:
    time.sleep(seconds)


def threads() -> dict[str, str]:
    """How many threads each library is told to take."""
    return {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}


def reduce(numel: int, times: int) -> str:
    try:
        for step in range(times):
            all_reduce(torch.ones(numel), Codec(4), step=step)
    except GroupError as error:
        return str(error)
    return "done"


def first(rank: int, ranks: int) -> str:
    """Compiles what large tensors take too: their decoder writes past the caches."""
    return reduce(1000, 1) + reduce(8_000_000, 1)


def job(folder: Path, dies: bool) -> None:
    """Trains with a checkpoint after each step; the first time, if it is to die, rank 1 does on its way."""
    dist.init_process_group("gloo")
    rank, corpus = dist.get_rank(), load("stdlib", max_bytes=200_000)
    trainer = ParallelTrainer(GPT(PRESETS["tiny"]), corpus, TrainConfig(steps=8, batch=4), "fsdp", Codec(4))
    own = [int(path.name.split("-")[2]) for path in folder.glob(f"step-{rank}-*")]
    last = torch.tensor([max(own, default=0)])
    dist.all_reduce(last, dist.ReduceOp.MIN)  # a rank may have died before it wrote what another one wrote
    if last.item():
        trainer.load(folder / f"step-{rank}-{last.item()}")
    while trainer.steps_done < trainer.config.steps:
        if dies and rank == 1 and trainer.steps_done == 5 and not (folder / "died").exists():
            (folder / "died").touch()
            os._exit(9)
        trainer.step()
        trainer.save(folder / f"step-{rank}-{trainer.steps_done}")
    torch.save(trainer.mean_losses(), folder / f"losses-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    job(Path(sys.argv[1]), "--dies" in sys.argv)

"""What several processes do together on this machine: whether all wait for one slow writer, whether runs repeat."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from tq.train.model import GPT, PRESETS


def _rank(rank: int, work: Callable[..., Any], folder: str, ranks: int, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    found = work(Path(folder), **arguments)
    Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def together(work: Callable[..., Any], ranks: int, **arguments: Any) -> list[Any]:
    """What a function of a module returns on each of so many new processes of one gloo group.

    Args:
        work: takes a folder that all share, and ``arguments``; returns what JSON can say.
        ranks: how many processes, one thread each.
        arguments: of the function.

    Raises:
        torch.multiprocessing.ProcessException: where one of them fails.
    """
    multiprocessing.set_forkserver_preload([__name__])  # PyTorch is imported once for all that follow
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (work, folder, ranks, arguments), nprocs=ranks, start_method="forkserver")
        return [json.loads(Path(folder, f"found-{rank}.json").read_text()) for rank in range(ranks)]


class _Slow(dcp.FileSystemWriter):
    """A store that takes longer for what one rank writes."""

    def __init__(self, path: str | os.PathLike[str], seconds: float) -> None:
        super().__init__(path)
        self.seconds = seconds

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(self.seconds)
        return super().write_data(plan, planner)


def _one_slow_writer(folder: Path, seconds: float) -> float:
    numbers = torch.randn(200_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.barrier()
    began = time.perf_counter()
    dcp.save({f"w{dist.get_rank()}": numbers}, storage_writer=_Slow(folder / "checkpoint", seconds))
    return time.perf_counter() - began


def one_slow_writer(ranks: int, seconds: float) -> list[float]:
    """Seconds that a synchronous save of ``torch.distributed.checkpoint`` takes, rank by rank, where the store takes
    ``seconds`` longer for what rank 0 writes."""
    return together(_one_slow_writer, ranks, seconds=seconds)


def _trained(folder: Path, steps: int, sequences: int, seed: int) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(GPT(PRESETS["tiny"], seed))
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 256, (sequences, 65), generator=generator)  # of all ranks
        own = tokens.chunk(ranks)[rank]
        model(own[:, :-1], own[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.blake2b(weights, digest_size=16).hexdigest()


def digests_of_runs(ranks: int, steps: int, seed: int = 0, sequences: int = 8) -> list[str]:
    """Digests of the weights of all ranks after so many steps of data-parallel training with fixed seeds.

    Args:
        ranks: that share each batch.
        steps: of AdamW.
        seed: of weights and data; the same for any number of ranks.
        sequences: of a batch, over all ranks.
    """
    return together(_trained, ranks, steps=steps, sequences=sequences, seed=seed)

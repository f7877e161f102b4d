"""Functions on the ranks of a process group of real processes, over loopback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tq import Codec


@cache
def _compiled() -> None:
    """On a new machine every kernel is compiled once. Ranks would do that side by side, while the others' time runs."""
    for bits, dtypes in ((4, (torch.float32, torch.bfloat16, torch.float16)), (2, ()), (3, ()), (8, (torch.float16,))):
        for dtype in (torch.float32, *dtypes):
            Codec(bits).decode(Codec(bits).encode(torch.ones(128, dtype=dtype)))


def _rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], timeout_s: float, arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    try:
        found = {"value": function(rank, ranks, *arguments)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(found, f"{folder}/{rank}.pt")
    if "error" not in found:
        dist.barrier()
        dist.destroy_process_group()


def outcomes(
    ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60
) -> list[dict[str, Any]]:
    """What ``function(rank, ranks, *arguments)`` gave on each rank: {"value": ...}, {"error": text}, {} if it died."""
    _compiled()
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.spawn(_rank, (ranks, str(folder), function, timeout_s, arguments), ranks, join=False)
    for process in context.processes:
        process.join(timeout_s + 60)
        assert process.exitcode is not None, "a rank hangs"
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(file, weights_only=True) if file.is_file() else {} for file in files]


def values(ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``outcomes`` where every rank must have come to its end."""
    found = outcomes(ranks, folder, function, *arguments)
    for outcome in found:
        assert "value" in outcome, outcome.get("trace", "died")
    return [outcome["value"] for outcome in found]

"""Functions on the ranks of a process group of real processes, over loopback.

Ranks are forked from a server that has imported everything (``preload``): a rank starts in milliseconds, and what the
test process did, threads above all, is not in it.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


@cache
def _server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    with contextlib.chdir(ROOT):  # where it looks for modules
        forkserver.ensure_running()
    return context


def _rank(
    rank: int, ranks: int, folder: str, environment: dict[str, str], function: Callable[..., Any], timeout_s: float,
    backend: str, arguments: Any,
) -> None:  # fmt: skip
    os.environ.clear()
    os.environ.update(environment)  # as it is now, not when the server started
    store = dist.FileStore(f"{folder}/store", ranks)
    timeout = timedelta(seconds=timeout_s)
    if backend == "tq":
        import tq.backend  # noqa: F401
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    store.set(f"connected/{rank}", "")  # a function that ends its rank at once must not cut others that still connect
    store.wait([f"connected/{other}" for other in range(ranks)], timeout)
    try:
        found = {"value": function(rank, ranks, *arguments)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(found, f"{folder}/{rank}.pt")
    if "error" not in found:
        dist.barrier()
        dist.destroy_process_group()


def outcomes(
    ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60,
    backend: str = "gloo",
) -> list[dict[str, Any]]:  # fmt: skip
    """What ``function(rank, ranks, *arguments)`` gave on each rank: {"value": ...}, {"error": text}, {} if it died."""
    folder.mkdir(parents=True, exist_ok=True)
    given = ranks, str(folder), dict(os.environ), function, timeout_s, backend, arguments
    processes = [_server().Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()  # the first one waits for the server
    deadline = time.monotonic() + timeout_s + 60
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in hanging:
        processes[rank].kill()
    assert not hanging, f"ranks {hanging} hang"
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(file, weights_only=True) if file.is_file() else {} for file in files]


def values(
    ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """``outcomes`` where every rank must have come to its end."""
    found = outcomes(ranks, folder, function, *arguments, backend=backend)
    for outcome in found:
        assert "value" in outcome, outcome.get("trace", "died")
    return [outcome["value"] for outcome in found]

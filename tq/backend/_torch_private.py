"""Every use of a name that PyTorch keeps to itself, in this package. Written against torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NEW_NAMES = {  # of torch 2.13: the names before
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def is_registered(backend: str) -> bool:
    """Whether a backend of this name is known."""
    return backend.upper() in dist.Backend._plugins


def plain_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group over gloo, and over NCCL where there is a GPU, that PyTorch keeps no list of."""
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("tq-gloo", store), rank, size, timeout)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("tq-nccl", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        group._set_default_backend(kinds.NCCL)
    return group


class FutureWork(dist.Work):
    """A collective whose result comes from a future: ``wait`` raises its error."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Works(dist.Work):
    """Several at once, as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])

"""Which bytes a rank sends: every collective and message of PyTorch, counted by operation where it is dispatched.

Counted are the bytes that the usual algorithm makes a rank send: of n ranks and a tensor of S bytes (n - 1) / n S for
an all-gather, a reduce-scatter or an all-to-all, twice that for an all-reduce, S for a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tq.train._pipelining import group_named
from tq.train._torch_private import DispatchMode

_FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


class Traffic(DispatchMode):
    """Counts while it is active.

    Attributes:
        sent: {(operation, ranks): bytes that this rank sends}.
        calls: {(operation, ranks): calls}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[str, int], float] = defaultdict(float)
        self.calls: dict[tuple[str, int], int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):  # what it sends comes by here as plain tensors
            return NotImplemented
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        found = func(*args, **(kwargs or {}))
        if space == "c10d":
            self._count_classic(name, args)
        elif space == "_c10d_functional" and name.startswith(_FUNCTIONAL):
            self._count_functional(name, args)
        return found

    def _add(self, name: str, ranks: int, sent: float) -> None:
        self.sent[name, ranks] += sent
        self.calls[name, ranks] += 1

    def _count_classic(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
        if group is None:
            return
        ranks = dist.ProcessGroup.unbox(group).size()
        share = (ranks - 1) / ranks
        if name in ("allreduce_", "allreduce_coalesced_"):
            self._add("all-reduce", ranks, 2 * share * _bytes(args[0]))
        elif name in ("_allgather_base_", "allgather_into_tensor_coalesced_", "allgather_"):
            self._add("all-gather", ranks, share * _bytes(args[0]))
        elif name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_"):
            self._add("reduce-scatter", ranks, share * _bytes(args[1]))
        elif name in ("alltoall_base_", "alltoall_"):
            splits = args[4] if name == "alltoall_base_" and len(args) > 4 else []
            self._add("all-to-all", ranks, _to_others(_tensors(args[1]), splits, dist.ProcessGroup.unbox(group)))
        elif name == "send":
            self._add("send", ranks, _bytes(args[0]))
        elif name == "broadcast_":
            self._add("broadcast", ranks, share * _bytes(args[0]))

    def _count_functional(self, name: str, args: tuple[Any, ...]) -> None:
        group = _named(args[-1])
        ranks = group.size()
        share, size = (ranks - 1) / ranks, _bytes(args[0])
        if name.startswith("all_reduce"):
            self._add("all-reduce", ranks, 2 * share * size)
        elif name.startswith("all_gather_into_tensor"):
            self._add("all-gather", ranks, (ranks - 1) * size)
        elif name.startswith("reduce_scatter_tensor"):
            self._add("reduce-scatter", ranks, share * size)
        elif name == "all_to_all_single":
            self._add("all-to-all", ranks, _to_others([args[0]], args[2], group))
        elif name == "broadcast":
            self._add("broadcast", ranks, share * size)

    def table(self) -> dict[str, float]:
        """{"operation n": bytes}, as JSON can say it."""
        return {f"{name} {ranks}": sent for (name, ranks), sent in sorted(self.sent.items()) if ranks > 1}


def _named(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        return group_named(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [tensor for each in found or () for tensor in _tensors(each)] if isinstance(found, list | tuple) else []


def _bytes(found: Any) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in _tensors(found)))


def _to_others(sent: list[Tensor], splits: Any, group: dist.ProcessGroup) -> float:
    """Bytes of what is not for this rank itself."""
    splits, rank, ranks = list(splits or []), group.rank(), group.size()
    if len(sent) > 1:
        return _bytes([tensor for other, tensor in enumerate(sent) if other != rank])
    row = sent[0].numel() * sent[0].element_size() / max(1, sent[0].shape[0])
    rows = [int(n) for n in splits] or [sent[0].shape[0] // ranks] * ranks
    return row * (sum(rows) - rows[rank])


def interface_bytes(name: str = "lo") -> int:
    """Bytes that left a network interface of this process's network, headers and all."""
    with open("/proc/net/dev") as file:
        for line in file:
            interface, _, counters = line.partition(":")
            if interface.strip() == name:
                return int(counters.split()[8])
    raise OSError(f"there is no interface {name!r} here")


@contextmanager
def counted() -> Iterator[Traffic]:
    """``with counted() as traffic``: what the ranks send inside."""
    with Traffic() as traffic:
        yield traffic

"""A ``torch.distributed`` backend that codes gradients: for engines that know nothing of it.

    import tq.backend
    torch.distributed.init_process_group("tq")                      # all groups, or one axis of a mesh:
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "tq"})

Sums and means of large float tensors are coded, in all-reduces and reduce-scatters; everything else goes to gloo (CPU)
or NCCL (GPU) as it is, but for large reduce-scatters on CPUs, of which gloo would send twice the bytes. ``configure``
and environment variables say what is coded; ``report`` says what it saved. A group of tensor parallelism would have its
activations coded: give such an axis another backend.
"""

from __future__ import annotations

import torch.distributed as dist

from tq.backend import _torch_private
from tq.backend.group import CodedGroup, create
from tq.backend.settings import Config, configure, configured

__all__ = ["CodedGroup", "Config", "configure", "configured", "groups", "load_state_dict", "report", "state_dict"]

NAME = "tq"
if not _torch_private.is_registered(NAME):
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def groups() -> dict[str, CodedGroup]:
    """The groups of this backend that are there, by name."""
    return {group.group_name: group for group in CodedGroup.alive()}


def report() -> str:
    """What was sent, as a table: calls and bytes of this rank, by group and kind of collective.

    Returns:
        Lines of text. Bytes are those of the usual algorithms, without what the wire adds.

    Example:
        >>> import torch, torch.distributed as dist, tq.backend
        >>> dist.init_process_group("tq", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.all_reduce(torch.ones(10_000))
        >>> print(tq.backend.report())
        group  kind        calls  coded  bytes plain  bytes sent  ratio
        0      all_reduce      1      0            0           0      -
        >>> dist.destroy_process_group()
    """
    head = ("group", "kind", "calls", "coded", "bytes plain", "bytes sent", "ratio")
    rows = [head, *(row for group in groups().values() for row in group.counts.rows(group.group_name))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) if column < 2 else text.rjust(width)
                  for column, (text, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
    for name, group in groups().items():
        if not (warmup := group.warmup).over:
            lines.append(f"group {name}: sums are exact for {warmup.steps} steps, of which {warmup.done} are over")
    return "\n".join(lines)


def state_dict() -> dict[str, int]:
    """Coded collectives so far of every group, which select the seeds: save it with a checkpoint.

    Returns:
        The number by the name of the group. A group of one rank codes nothing and is left out.

    Example:
        >>> import torch.distributed as dist, tq.backend
        >>> dist.init_process_group("tq", store=dist.HashStore(), rank=0, world_size=1)
        >>> tq.backend.state_dict()
        {}
        >>> dist.destroy_process_group()
    """
    return {name: group.calls for name, group in groups().items() if group.size() > 1}


def load_state_dict(state: dict[str, int]) -> None:
    """Continue from ``state_dict``, in groups of the same names.

    A group that has coded is past its first steps; from 0 on, they begin anew, as for another model in one process.

    Args:
        state: as ``state_dict`` returned it.

    Raises:
        KeyError: for a group that is not there.

    Example:
        >>> import torch.distributed as dist, tq.backend
        >>> dist.init_process_group("tq", store=dist.HashStore(), rank=0, world_size=1)
        >>> tq.backend.load_state_dict({"0": 12})
        >>> tq.backend.groups()["0"].calls
        12
        >>> dist.destroy_process_group()
    """
    known = groups()
    for name, calls in state.items():
        if name not in known:
            raise KeyError(f"there is no group {name!r} of backend tq; there are {', '.join(known) or 'none'}")
        known[name].resume(calls)

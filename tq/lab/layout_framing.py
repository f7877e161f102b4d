"""What leaves the interface beside the payload: measured for single operations, then predicted for whole layouts.

gloo cuts an operation into messages, and TCP adds headers and acknowledgements to each. How much that is depends on the
operation, the number of ranks and the size; so it is measured for each, alone, on ranks that do nothing else
(``ruler``). A layout's step is predicted from its list of operations (``Calls``) without any further number.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tq.train.crew import crew
from tq.train.traffic import Traffic, interface_bytes

SIZES = (256, 2048, 16384, 131072, 1048576)  # bytes of the whole tensor
REPEATS = 8  # calls of a size, one after the other
#: How often gloo sends the payload: its reduce-scatter is an all-reduce.
TIMES_SENT = {"reduce-scatter": 2.0}


def private_network() -> list[str]:
    """The command that gives a crew a network of its own, whose counters nobody else moves; [] where none is allowed.

    Root makes it directly, whoever is not root in a user namespace.
    """
    command = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net"]
    with contextlib.suppress(OSError):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return []


class Calls(Traffic):
    """Counts as ``Traffic`` does, and keeps every size.

    Attributes:
        sizes: {(operation, ranks, bytes that this rank sends in one call): calls}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, int, float], int] = defaultdict(int)

    def _add(self, name: str, ranks: int, sent: float) -> None:
        super()._add(name, ranks, sent)
        self.sizes[name, ranks, sent] += 1

    def listed(self) -> list[tuple[str, int, float, int]]:
        """(operation, ranks, bytes of a call, calls) of groups with more than one rank, as JSON can say it."""
        return [(*key, calls) for key, calls in sorted(self.sizes.items()) if key[1] > 1]


def quiet_interface(wait_s: float = 0.02) -> int:
    """Bytes that have left the interface of this crew's network, now that nothing is on its way."""
    dist.barrier()
    time.sleep(wait_s)
    found = interface_bytes()
    dist.barrier()
    return found


def _operations(group: dist.ProcessGroup, ranks: int, size: int) -> dict[str, Callable[[], object]]:
    """{operation: one call of it on a tensor of ``size`` bytes}; messages go round a ring."""
    numel = size // 4
    whole, part, other = torch.zeros(numel), torch.zeros(numel // ranks), torch.zeros(numel)
    own = dist.get_group_rank(group, dist.get_rank())
    after, before = (dist.get_global_rank(group, (own + step) % ranks) for step in (1, -1))
    first = dist.get_global_rank(group, 0)

    def message() -> None:
        sending = dist.isend(whole, after, group)
        dist.recv(other, before, group)
        if sending is not None:
            sending.wait()

    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group),
        "send": message,
    }


def ruler(folder: Path, sizes: Sequence[int] = SIZES) -> dict[str, list[tuple[float, float]]]:
    """On a rank of a crew with a private network: {"operation ranks": [(bytes that a rank sends, bytes beyond what
    gloo sends of them)]}, of one call and the mean of all ranks, by size."""
    world, found = dist.get_world_size(), defaultdict(list)
    ranks = 2
    while ranks <= world:
        groups = [dist.new_group(list(range(at, at + ranks))) for at in range(0, world, ranks)]
        group = groups[dist.get_rank() // ranks]
        for size in sizes:
            for name, call in _operations(group, ranks, size).items():
                call()  # connections are made in the first one
                before = [quiet_interface(), quiet_interface()]  # their difference: the looking itself
                with Calls() as traffic:
                    for _ in range(REPEATS):
                        call()
                left = quiet_interface() - before[1] - (before[1] - before[0])
                ((_, _, sent, _),) = traffic.listed()
                found[f"{name} {ranks}"].append((sent, left / world / REPEATS - TIMES_SENT.get(name, 1.0) * sent))
        ranks *= 2
    return dict(found)


def measured(task: dict[str, Any], device: str = "cpu") -> dict[str, Any] | None:
    """What ``ruler`` says on a crew of ``task["ranks"]``; None where no private network is allowed."""
    alone = private_network()
    return crew("tq.lab.layout_framing:ruler", task["ranks"], 600.0, alone)[0] if alone else None


def beyond(known: Sequence[Sequence[float]], sent: float) -> float:
    """Bytes beyond the payload of a call that sends so many, between the measured sizes; beyond them the last slope,
    below them the first value."""
    at = [each[0] for each in known]
    if sent <= at[0]:
        return known[0][1]
    k = min(bisect.bisect_left(at, sent), len(at) - 1)
    (x0, y0), (x1, y1) = known[k - 1], known[k]
    return y0 + (y1 - y0) * (sent - x0) / (x1 - x0)


def expected(ranks: Sequence[Sequence[Sequence[Any]]], known: Mapping[str, Sequence[Sequence[float]]]) -> float:
    """Bytes that leave the interface for the calls of all ranks, headers and acknowledgements included.

    Args:
        ranks: of each rank its calls, as ``Calls.listed`` gives them.
        known: what ``ruler`` measured.

    Raises:
        KeyError: for an operation that was not measured.
    """
    return sum(
        times * (TIMES_SENT.get(name, 1.0) * sent + beyond(known[f"{name} {size}"], sent))
        for calls in ranks
        for name, size, sent, times in calls
    )

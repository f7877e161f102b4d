"""Messages of deep gradient compression beside those of 4-bit gradients, counted where they leave a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.lab.net.crew import Crew
from tq.lab.net.hosts import Lab, obstacle
from tq.quant.codec import Codec
from tq.systems.synchronisation import sparse_bytes
from tq.train.collectives import all_reduce
from tq.train.schemes.sparse import SHARE, chosen, pack


def _sparse(x: Tensor, step: int) -> None:
    message = pack(x, chosen(x, [torch.Size((1, x.numel()))], SHARE))
    dist.all_gather([torch.empty_like(message) for _ in range(dist.get_world_size())], message)


def _ours(x: Tensor, step: int) -> None:
    all_reduce(x, Codec(4), step=step)


def _fp32(x: Tensor, step: int) -> None:
    dist.all_reduce(x)


SENDERS: dict[str, Callable[[Tensor, int], None]] = {"dgc": _sparse, "ours": _ours, "fp32": _fp32}


def send(method: str, numel: int, times: int) -> None:
    """What a rank of a crew does: so many gradients of ``numel`` numbers, by one of ``SENDERS``."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(times):
        SENDERS[method](torch.randn(numel, generator=generator), step)


def payload(method: str, ranks: int, numel: int) -> float:
    """Bytes that a rank sends of one gradient, by the formulas: without headers."""
    if method == "dgc":
        return sparse_bytes(numel, ranks, SHARE)
    return 2 * (ranks - 1) / ranks * numel * (32 if method == "fp32" else Codec(4).bits_per_element) / 8


def wire(task: dict[str, Any], device: str = "cpu") -> dict[str, dict[str, float]] | None:
    """{method: {"interface": bytes that left a host per gradient, mean of the hosts, "payload": by formula, "over":
    the first over the second, which is what headers and acknowledgements add}}; None where this machine has none.

    Args:
        task: ranks, numel and times (gradients that are counted, after one that is not).
        device: "cpu".
    """
    if obstacle() is not None:
        return None
    ranks, numel, times, found = task["ranks"], task["numel"], task["times"], dict[str, dict[str, float]]()
    with Lab(ranks) as lab, Crew(lab) as crew:
        for method in SENDERS:
            crew.call(send, method=method, numel=numel, times=1)  # makes the connections
            before = [lab.sent_bytes(host) for host in range(ranks)]
            crew.call(send, method=method, numel=numel, times=times)
            sent = sum(lab.sent_bytes(host) - b for host, b in enumerate(before)) / ranks / times
            expected = payload(method, ranks, numel)
            found[method] = {"interface": sent, "payload": expected, "over": sent / expected}
    return found

"""Ring attention: every rank holds a part of the sequence, and keys and values go round.

n ranks hold the queries, keys and values of T / n positions each. In n - 1 rounds each passes keys and values on and
joins what it sees by log-sum-exp. Backward, keys, values and their gradients go round; the gradients take one round
more, home. With ``balanced`` places rank r holds chunks r and 2 n - 1 - r of 2 n, so that a causal mask leaves all the
same work; the bytes are the same.

Source: Liu et al. 2023 (arXiv:2310.01889); balance: Brandon et al. 2023 (arXiv:2311.09431), Llama 3 (arXiv:2407.21783).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def places(length: int, rank: int, ranks: int, balanced: bool) -> Tensor:
    """Positions that a rank holds, int64 [length / ranks]."""
    parts = 2 * ranks if balanced else ranks
    if length % parts:
        raise ValueError(f"the sequence of {length} must divide into {parts} parts")
    chunks = torch.arange(length).chunk(parts)
    return torch.cat([chunks[rank], chunks[parts - 1 - rank]]) if balanced else chunks[rank]


def _pass_on(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Gives tensors to the next rank of the ring, and takes those of the one before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    to, come = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    sent = torch.stack(tensors)
    received = torch.empty_like(sent)
    ops = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, come, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return list(received.unbind(0))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, where: list[Tensor], group: Any) -> Tensor:
        rank, ranks, scale = dist.get_rank(group), dist.get_world_size(group), q.shape[-1] ** -0.5
        out, lse, key, value = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf), k, v
        for turn in range(ranks):
            source = (rank - turn) % ranks
            scores = _scores(q, key, where[rank], where[source], scale)
            here = scores.logsumexp(-1)
            joined = torch.logaddexp(lse, here)
            safe = joined.masked_fill(joined.isinf(), 0.0)  # nothing was seen yet
            out = out * (lse - safe).exp()[..., None] + (scores - safe[..., None]).exp() @ value
            lse = joined
            if turn < ranks - 1:
                key, value = _pass_on([key, value], group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where, ctx.group = where, group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        d, where, group = gradients[0].contiguous(), ctx.where, ctx.group
        rank, ranks, scale = dist.get_rank(group), dist.get_world_size(group), q.shape[-1] ** -0.5
        delta, dq = (d * out).sum(-1, keepdim=True), torch.zeros_like(q)
        key, value, dk, dv = k, v, torch.zeros_like(k), torch.zeros_like(v)
        for turn in range(ranks):
            source = (rank - turn) % ranks
            p = (_scores(q, key, where[rank], where[source], scale) - lse[..., None]).exp()
            dv = dv + p.mT @ d
            ds = p * (d @ value.mT - delta) * scale
            dq, dk = dq + ds @ key, dk + ds.mT @ q
            if turn < ranks - 1:
                key, value = _pass_on([key, value], group)
            if ranks > 1:  # they travel with their keys, and once more, home
                dk, dv = _pass_on([dk, dv], group)
        return dq, dk, dv, None, None


def _scores(q: Tensor, k: Tensor, mine: Tensor, theirs: Tensor, scale: float) -> Tensor:
    return ((q @ k.mT) * scale).masked_fill(theirs[None, :] > mine[:, None], -torch.inf)


class RingAttention(nn.Module):
    """A plug for ``Attention.core``: queries, keys and values [B, heads, T / n, D] of this rank's places.

    Args:
        length: T, positions of the whole sequence.
        group: n ranks that hold it.
        balanced: whether a rank holds a part of the head and one of the tail.
    """

    def __init__(self, length: int, group: dist.ProcessGroup, balanced: bool = False) -> None:
        super().__init__()
        ranks = dist.get_world_size(group)
        self.group, self.where = group, [places(length, rank, ranks, balanced) for rank in range(ranks)]

    def forward(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if q_BHTD.shape[1] != k_BKTD.shape[1]:
            times = q_BHTD.shape[1] // k_BKTD.shape[1]
            k_BKTD, v_BKTD = (x.repeat_interleave(times, 1) for x in (k_BKTD, v_BKTD))
        found: Tensor = _Ring.apply(q_BHTD, k_BKTD.contiguous(), v_BKTD.contiguous(), self.where, self.group)
        return found

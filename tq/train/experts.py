"""A small mixture of experts whose experts lie on different ranks: tokens travel to them and back, unevenly.

Every token goes to its k best experts (router in fp32, ties to the lower index); nothing is dropped. With a group, rank
r of n holds experts r E / n ... (r + 1) E / n - 1. Tokens go out and come back by an all-to-all with uneven splits, and
their gradients the same way: four a layer and step.

Source: Lepikhin et al. 2020 (arXiv:2006.16668); routing without capacity as Gale et al. 2022 (arXiv:2211.15841).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tq.quant.codec import Codec
from tq.train import wire


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks that they are for; the gradients go back the same way. With a codec, both in its bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Any, group: Any, codecs: Any, key: Any) -> Tensor:
        ctx.splits, ctx.group, ctx.codecs, ctx.key = splits, group, codecs, key
        out, into = splits
        return _exchange(x, out, into, group, codecs[0], (*key, 0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        out, into = ctx.splits
        return (_exchange(gradients[0], into, out, ctx.group, ctx.codecs[1], (*ctx.key, 1)), *[None] * 4)


def _exchange(
    x: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup, codec: Codec | None, key: tuple[int, ...]
) -> Tensor:
    """Sends ``into[r]`` rows to rank r, receives ``out[r]`` from it."""
    received = x.new_empty(sum(out), *x.shape[1:])
    if codec is None:
        dist.all_to_all_single(received, x.contiguous(), out, into, group=group)
        return received
    rank, width = dist.get_rank(group), x[0].numel() if len(x) else received[0].numel() if len(received) else 1
    sizes = [[wire.nbytes(codec, rows * width) if rows else 0 for rows in split] for split in (into, out)]
    parts = [
        wire.pack(part, codec, (*key, rank, to)) if len(part) else x.new_empty(0, dtype=torch.uint8)
        for to, part in enumerate(x.split(into))
    ]
    messages = torch.empty(sum(sizes[1]), dtype=torch.uint8)
    dist.all_to_all_single(messages, torch.cat(parts), sizes[1], sizes[0], group=group)
    for sender, (part, message) in enumerate(zip(received.split(out), messages.split(sizes[1]), strict=True)):
        if len(part):
            wire.unpack(message, part, codec, (*key, sender, rank))
    return received


class Experts(nn.Module):
    """A feed-forward layer of E experts, of which every token uses k; a plug for ``Block.mlp``.

    Args:
        hidden, width: of the layer and of each expert.
        experts: E. chosen: k.
        generator: draws the weights of all E, so that they are the same however they are split.
        group: over which the experts are split; None holds them all.
        codecs: of tokens and of their gradients; None sends fp32.
    """

    def __init__(
        self, hidden: int, width: int, experts: int, chosen: int, *, generator: torch.Generator,
        group: dist.ProcessGroup | None = None, codecs: tuple[Codec | None, Codec | None] = (None, None),
        number: int = 0, step: list[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
        if experts % ranks or not 1 <= chosen <= experts:
            raise ValueError(f"ranks={ranks} must divide experts={experts}, of which chosen={chosen} are used")
        self.chosen, self.count, self.group, self.codecs, self.number = chosen, experts, group, codecs, number
        self.step = step if step is not None else [0]
        self.router = nn.Linear(hidden, experts, bias=False)
        own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
        up, down = torch.empty(experts, hidden, width), torch.empty(experts, width, hidden)
        with torch.no_grad():
            self.router.weight.normal_(0.0, 0.02, generator=generator)
            self.up = nn.Parameter(up.normal_(0.0, 0.02, generator=generator)[own].clone())
            self.down = nn.Parameter(down.normal_(0.0, 0.02, generator=generator)[own].clone())
        self.calls = 0
        self.off_rank = self.returned = 0  # rows to other ranks in the last call, and rows of others sent back

    def forward(self, x_BTC: Tensor) -> Tensor:
        rows = x_BTC.reshape(-1, x_BTC.shape[-1])
        scores = F.softmax(self.router(rows).float(), dim=-1)
        # stable: among equal scores the lower index is first, on every rank
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
        weights = scores.gather(1, order).type_as(rows)
        weights = weights / weights.sum(-1, keepdim=True)
        expert, place = order.flatten().sort(stable=True)
        counts = torch.bincount(expert, minlength=self.count)
        sent = rows[place // self.chosen]
        done = self._computed(sent, counts) if self.group is None else self._travel(sent, counts)
        back = torch.zeros_like(done).index_copy(0, place, done)
        return (back.view(-1, self.chosen, rows.shape[-1]) * weights[..., None]).sum(1).view_as(x_BTC)

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        done = [F.gelu(part @ u, approximate="tanh") @ d for part, u, d in zip(parts, self.up, self.down, strict=True)]
        return torch.cat(done)

    def _travel(self, sent: Tensor, counts: Tensor) -> Tensor:
        group = self.group
        assert group is not None
        ranks, rank, own = dist.get_world_size(group), dist.get_rank(group), len(self.up)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)  # rows of each rank for each of this rank's experts
        into, out = counts.view(ranks, own).sum(1).tolist(), theirs.view(ranks, own).sum(1).tolist()
        self.off_rank, self.returned = sum(into) - into[rank], sum(out) - out[rank]
        self.calls += 1
        key = (self.step[0], self.number, self.calls)
        arrived = _AllToAll.apply(sent, (out, into), group, self.codecs, (*key, 0))
        # from (rank, expert) to (expert, rank), so that each expert's rows lie together
        blocks = theirs.view(ranks, own)
        owner = torch.arange(own).repeat(ranks).repeat_interleave(theirs)
        place = owner.sort(stable=True).indices
        done = self._computed(arrived[place], blocks.sum(0))
        done = torch.zeros_like(done).index_copy(0, place, done)
        result: Tensor = _AllToAll.apply(done, (into, out), group, self.codecs, (*key, 1))
        return result

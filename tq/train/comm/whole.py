"""Compressed means and sums of one tensor on GPUs, whole: few launches and calls, so that the host keeps ahead.

In pieces (``pipeline``) a tensor fills a slow link early; on a card a piece costs the host more than it costs the card.
Codes, seeds and sums are the same, so ranks end with the bits that pieces would give them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Codec
from tq.quant.rank_mean import RankMean, why_not
from tq.train.comm.agreement import Attempt, Request, check_consistent, guarded
from tq.train.comm.channels import Channel, all_gather
from tq.train.comm.layout import Codecs, Key, chunk_numel, chunk_of


@lru_cache(256)
def fits(codecs: Codecs, device: torch.device) -> bool:
    """Whether this device has the kernels for both codecs."""
    return why_not(codecs, device) is None


class _Codes(NamedTuple):
    """Codes of blocks that follow each other: uint8 [blocks, bytes] and [blocks]."""

    payload: Tensor
    scales: Tensor

    def first(self, blocks: int) -> tuple[Tensor, Tensor]:
        return self.payload[:blocks], self.scales[:blocks]

    def messages(self) -> tuple[Tensor, Tensor]:
        """Both as flat bytes."""
        return self.payload.view(-1), self.scales.view(torch.uint8)


def _new(made: RankMean, phase: int, blocks: int, device: torch.device) -> _Codes:
    payload = torch.empty(blocks, made.payload_bytes[phase], dtype=torch.uint8, device=device)
    return _Codes(payload, torch.empty(blocks, dtype=made.scale_dtypes[phase], device=device))


def mean_of_whole(x: Tensor, key: Key, codecs: Codecs, channel: Channel) -> None:
    """Flat x (fp32, bf16, fp16; contiguous, on a GPU) becomes the mean over the ranks, in place, on the current stream.

    Blocks that are not finite on any rank become NaN. A rank whose own part fails raises its error, and the others get
    NaN; GroupError as in ``pipeline.mean_over``. codecs: of the two phases, of one block size.
    """
    step, *names = key
    group, numel, block = channel.group, x.numel(), codecs[0].block
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    check_consistent(Request("a whole mean", codecs, ((numel, x.dtype),), (key,)), x.device, channel)
    room, blocks = chunk_of(numel, block, 0, ranks)[1], -(-numel // block)
    own = chunk_numel(numel, block, rank, ranks)
    with Attempt(channel) as attempt:
        made = RankMean.of(codecs, tuple(names), ranks, x.device)
        sent, received = (_new(made, 0, ranks * room, x.device) for _ in range(2))
        mine, gathered = (_new(made, 1, count * room, x.device) for count in (1, ranks))
        signs = made.signs(step)
        attempt.make(lambda: made.encode(x.view(1, -1), *sent.first(blocks), signs, rank), sent.messages()[1])
        with guarded(channel):
            for into, given in zip(received.messages(), sent.messages(), strict=True):
                dist.all_to_all_single(into, given, group=group)

        def average() -> None:
            parts, scales = received.payload.view(ranks, room, -1), received.scales.view(ranks, room)
            made.average(parts, scales, *mine, signs, own)

        attempt.make(average if own else lambda: None, mine.messages()[1])
        with guarded(channel):
            for into, given in zip(gathered.messages(), mine.messages(), strict=True):
                all_gather(into, given, group=group)
        attempt.make(lambda: made.decode(*gathered.first(blocks), x, signs))


def scatter_whole(out: Tensor, x: Tensor, step: int, codec: Codec, channel: Channel, mean: bool) -> None:
    """Flat out becomes this rank's part of the sum, or mean, of the ranks' x, each [ranks * numbers of out], on GPUs.

    As ``mean_of_whole``, with one phase, whose parts are padded to whole blocks each.
    """
    group, numel, codecs = channel.group, out.numel(), (codec, codec)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    check_consistent(Request("a whole reduce-scatter", (codec,), ((numel, x.dtype),), ((step,),)), x.device, channel)
    room = -(-numel // codec.block)
    with Attempt(channel) as attempt:
        made = RankMean.of(codecs, (), ranks, x.device)
        sent, received = (_new(made, 0, ranks * room, x.device) for _ in range(2))
        signs = made.signs(step)
        attempt.make(lambda: made.encode(x.view(ranks, numel), *sent, signs, rank), sent.messages()[1])
        with guarded(channel):
            for into, given in zip(received.messages(), sent.messages(), strict=True):
                dist.all_to_all_single(into, given, group=group)

        def add() -> None:
            parts, scales = received.payload.view(ranks, room, -1), received.scales.view(ranks, room)
            made.total(parts, scales, out, signs, float(ranks if mean else 1))

        attempt.make(add)

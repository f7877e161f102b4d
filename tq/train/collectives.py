"""Means over ranks, exact or compressed: what is asked for, and who answers.

An algorithm asks by yielding a ``Mean``; the answer is written into it. So the same code runs on one rank of a process
group, alone, or as one of several workers simulated in a process, where only the wire is missing.

The compressed all-reduce has two legs. Every rank encodes its tensor and sends each other rank that rank's chunk; the
chunks are decoded and averaged in fp32, encoded again and sent to all, who decode the same bytes. The first leg's seed
is the rank's own, so that the errors of the ranks are independent; the second is shared.

Bytes a rank sends: (n - 1)/n of the tensor's code in each leg, where a ring all-reduce sends (n - 1)/n of its 4 bytes
an element twice.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Code, Codec

Codecs = tuple[Codec, Codec]
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass
class Mean:
    """Asks that ``x``, a flat fp32 tensor, become the mean over all ranks.

    Attributes:
        x: overwritten by the mean.
        codecs: of the two legs; None sends fp32.
        key: names the seeds, with the leg and the rank: (step, number of the bucket, ...).
        errors: error feedback: what the former codes of the two legs lost, added before coding; replaced by what is
            lost now. The first is as long as x, the second as this rank's chunk (``chunk_of``).
        nbytes: bytes that a rank sends, where it is not the usual algorithm that carries x (a sparse tensor, say).
    """

    x: Tensor
    codecs: Codecs | None = None
    key: tuple[int | str, ...] = ()
    errors: tuple[Tensor, Tensor] | None = None
    nbytes: float | None = field(default=None, kw_only=True)

    def sent_bytes(self, ranks: int) -> float:
        """Bytes that each of so many ranks sends (mean over the ranks)."""
        if self.nbytes is not None:
            return self.nbytes
        share = (ranks - 1) / ranks
        if self.codecs is None:
            return 2 * share * 4 * self.x.numel()
        return sum(share * code_bytes(codec, self.x.numel()) for codec in self.codecs)


Asking = Generator[Mean, None, None]


def code_bytes(codec: Codec, numel: int) -> int:
    """Bytes of the code of a flat tensor."""
    return -(-numel // codec.block) * (codec.packed_bytes + codec.scale_dtype.itemsize)


def chunk_of(numel: int, block: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, end) block of the chunk that a rank averages: whole blocks, the last ranks may get fewer or none."""
    blocks = -(-numel // block)
    each = -(-blocks // ranks)
    return min(rank * each, blocks), min((rank + 1) * each, blocks)


def chunk_numel(numel: int, block: int, rank: int, ranks: int) -> int:
    """Elements of that chunk."""
    first, end = chunk_of(numel, block, rank, ranks)
    return min(end * block, numel) - min(first * block, numel)


def _encode_first(asked: Mean, rank: int) -> Code:
    assert asked.codecs is not None
    codec = asked.codecs[0].derive(*asked.key, 1, rank)
    if asked.errors is None:
        return codec.encode(asked.x)
    owed = asked.x + asked.errors[0]
    code = codec.encode(owed)
    asked.errors = owed.sub_(codec.decode(code)), asked.errors[1]
    return code


def _encode_second(asked: Mean, parts: Sequence[Code]) -> Code:
    """The chunk's mean, from the ranks' codes of it in the order of the ranks."""
    assert asked.codecs is not None
    codec = asked.codecs[1].derive(*asked.key, 2)
    total = torch.zeros(parts[0].shape, device=asked.x.device)
    for part in parts:
        part.codec.decode(part, out=total, accumulate=True)
    if asked.errors is None:
        return codec.encode(total, factor=1 / len(parts))
    owed = total.div_(len(parts)).add_(asked.errors[1])
    code = codec.encode(owed)
    asked.errors = asked.errors[0], owed.sub_(codec.decode(code))
    return code


def _part(code: Code, numel: int, first: int, end: int) -> Code:
    """Blocks first ... end - 1 of the code of a flat tensor."""
    block = code.codec.block
    length = min(end * block, numel) - min(first * block, numel)
    return Code(code.codec, (length,), code.dtype, code.payload[first:end], code.scales[first:end])


def simulate(asked: Sequence[Mean]) -> None:
    """Answers the requests of all ranks of a simulated group, given in the order of the ranks."""
    ranks, numel, codecs = len(asked), asked[0].x.numel(), asked[0].codecs
    if codecs is None:
        mean = torch.stack([request.x for request in asked]).mean(0) if ranks > 1 else asked[0].x
        for request in asked:
            request.x.copy_(mean)
        return
    codes = [_encode_first(request, rank) for rank, request in enumerate(asked)]
    for rank, request in enumerate(asked):
        first, end = chunk_of(numel, codecs[0].block, rank, ranks)
        if end > first:
            code = _encode_second(request, [_part(c, numel, first, end) for c in codes])
            chunk = slice(first * codecs[0].block, min(end * codecs[0].block, numel))
            mean = code.codec.decode(code)
            for receiver in asked:
                receiver.x[chunk] = mean


def _rows(code: Code, rows: int) -> Tensor:
    """Payload and scale of each block side by side, as uint8 [rows, bytes]: one message."""
    bytes_N = torch.cat([code.payload, code.scales[:, None].view(torch.uint8)], 1)
    return torch.nn.functional.pad(bytes_N, (0, 0, 0, rows - bytes_N.shape[0]))


def _code(codec: Codec, rows: Tensor, numel: int) -> Code:
    blocks = -(-numel // codec.block)
    payload, scales = rows[:blocks].split([codec.packed_bytes, codec.scale_dtype.itemsize], 1)
    return Code(
        codec, (numel,), torch.float32, payload.contiguous(), scales.contiguous().view(codec.scale_dtype).view(-1)
    )


def over_group(asked: Mean, group: dist.ProcessGroup | None = None) -> None:
    """Answers the request of this rank with the other ranks of a process group, who must ask for the same."""
    ranks, rank, numel = dist.get_world_size(group), dist.get_rank(group), asked.x.numel()
    if asked.codecs is None:
        dist.all_reduce(asked.x, group=group)
        asked.x.div_(ranks)
        return
    first_codec, second_codec = asked.codecs
    each = chunk_of(numel, first_codec.block, 0, ranks)[1]  # rows of a message: the first chunk is never the smaller
    sent = _rows(_encode_first(asked, rank), ranks * each)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mine = chunk_numel(numel, first_codec.block, rank, ranks)
    parts = [
        _code(first_codec.derive(*asked.key, 1, sender), rows, mine) for sender, rows in enumerate(received.split(each))
    ]
    mean = second_codec.derive(*asked.key, 2)
    chunk = _rows(_encode_second(asked, parts) if mine else mean.empty((0,), torch.float32, asked.x.device), each)
    everything = torch.empty(ranks * each, chunk.shape[1], dtype=torch.uint8, device=chunk.device)
    _all_gather(everything, chunk, group=group)
    mean.decode(_code(mean, everything, numel), out=asked.x)

"""The compressed mean over ranks: a tensor travels in pieces, each by a reduce-scatter and an all-gather of codes.

While one piece is on the wire the next is encoded and the last one decoded. In the reduce-scatter every rank sends each
other rank that rank's chunk of the piece, encoded; chunks are decoded, averaged in fp32, encoded again and gathered by
all, who decode the same bytes. Codes are of blocks, so what comes out does not depend on pieces or chunks.

What a code loses is its *residual*; with error feedback it is added before the next encoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Code, Codec
from tq.train.comm.agreement import Attempt, Request, check_consistent, guarded
from tq.train.comm.channels import TURNS, Channel, Messages, all_gather, channel_of, check_farewells, expect
from tq.train.comm.layout import (
    Codecs,
    Key,
    chunk_numel,
    chunk_of,
    message_bytes,
    new_messages,
    seeded,
    view_code,
)

PIPELINE_ELEMENTS = 1 << 22  # of a piece: 2 MB at 4 bits: a slow link is busy, a fast one does not wait for the first
Residuals = tuple[Tensor, Tensor]  # of the two phases: as long as the tensor, and as this rank's chunk of it


def encode_residual(codec: Codec, x: Tensor, out: Code, residual: Tensor | None) -> Tensor | None:
    """Encodes x and what was lost before; returns what is lost now, None where nothing is kept of it."""
    if residual is None:
        codec.encode(x, out)
        return None
    whole = x + residual
    codec.encode(whole, out)
    return whole.sub_(codec.decode(out))


def encode_mean(
    parts: Sequence[Code],
    out: Code,
    residual: Tensor | None = None,
    look: bool | None = None,
    total: Tensor | None = None,
) -> Tensor | None:
    """Encodes the mean of the ranks' codes of a chunk, summed in fp32 in their order; returns as ``encode_residual``.

    A block that is not finite says in its payload, which has no other use then, whose part it was: rank + 1.
    look: whether to see first if there is such a block; None: not on a GPU, which would wait. total: fp32 memory to sum
    in; None: new.
    """
    total = parts[0].codec.decode(parts[0], out=total)
    for part in parts[1:]:
        part.codec.decode(part, out=total, accumulate=True)
    if residual is None:
        out.codec.encode(total, out, factor=1 / len(parts))
    else:
        residual = encode_residual(out.codec, total.div_(len(parts)), out, residual)
    if not (out.scales.device.type == "cpu" if look is None else look) or not torch.isfinite(out.scales.sum()):
        lost, says = out.scales.isnan(), out.payload[:, 0]
        for rank, part in reversed(list(enumerate(parts))):
            says.masked_fill_(lost & part.scales.isnan(), (rank + 1) % 255)
    return residual


class _Piece:
    """One piece of a tensor on its way to becoming the mean. The codecs propagate what is not finite."""

    def __init__(
        self, x: Tensor, key: Key, codecs: Codecs, attempt: Attempt, turn: int, residuals: Residuals | None = None
    ) -> None:
        self.x, self.attempt, self.turn = x, attempt, turn
        self.residuals: tuple[Tensor | None, Tensor | None] = residuals or (None, None)
        group = attempt.channel.group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.firsts = [seeded(codecs[0], key, 1, rank) for rank in range(self.ranks)]
        self.second = seeded(codecs[1], key, 2)
        self.room = chunk_of(x.numel(), codecs[0].block, 0, self.ranks)[1]  # blocks: no other chunk is larger
        self.lengths = [chunk_numel(x.numel(), codecs[0].block, rank, self.ranks) for rank in range(self.ranks)]
        self.scattered: Messages | None = None
        self.gathered: Messages | None = None

    def send(self) -> None:
        """Encodes a chunk for every rank and sends it off: the reduce-scatter."""
        codec, channel = self.firsts[self.rank], self.attempt.channel
        sizes = [message_bytes(chosen, self.room) for chosen in (codec, self.second)]
        with guarded(channel):
            self.scattered = Messages(sizes[0], self.x.device, channel, 2 * self.turn)
            self.gathered = Messages(sizes[1], self.x.device, channel, 2 * self.turn + 1)
        sent = new_messages(self.ranks, sizes[0], self.x.device)
        chunks, left = self.x.split(self.lengths), [self.x.new_empty(0, dtype=torch.float32)] * self.ranks
        before = [None] * self.ranks if self.residuals[0] is None else self.residuals[0].split(self.lengths)

        def encode(r: int) -> None:
            if self.lengths[r]:
                out = view_code(codec, sent[r], self.room, self.lengths[r], self.x.dtype)
                lost = encode_residual(codec, chunks[r], out, before[r])
                left[r] = left[r] if lost is None else lost

        def keep() -> None:
            self.residuals = torch.cat(left), self.residuals[1]

        for r in self.scattered.turns():
            self.attempt.make(partial(encode, r), sent[r])
            with guarded(channel):
                self.scattered.send(r, sent)
        if self.residuals[0] is not None:
            self.attempt.make(keep)

    def average(self) -> None:
        """Averages the chunks that the others sent, and sends all the result: the all-gather."""
        assert self.scattered is not None and self.gathered is not None
        with guarded(self.attempt.channel):
            received = self.scattered.wait()
        self.attempt.look(received)
        mine = new_messages(1, self.gathered.received.shape[1], self.x.device)[0]
        numel = self.lengths[self.rank]

        def encode() -> None:
            parts = [
                view_code(codec, message, self.room, numel, torch.float32)
                for codec, message in zip(self.firsts, received, strict=True)
            ]
            out = view_code(self.second, mine, self.room, numel, torch.float32)
            own = self.x.split(self.lengths)[self.rank]  # was sent and will be overwritten: the sum may lie there
            total = own if own.dtype == torch.float32 else None
            self.residuals = self.residuals[0], encode_mean(parts, out, self.residuals[1], total=total)

        self.attempt.make(encode if numel else lambda: None, mine)
        with guarded(self.attempt.channel):
            self.gathered.send_all(mine)

    def kept(self) -> Residuals:
        """The residuals now."""
        first, second = self.residuals
        assert first is not None and second is not None
        return first, second

    def receive(self, watched: bool) -> set[int]:
        """Writes the mean into the piece; where watched, the ranks whose part was not finite (-1: only the mean)."""
        assert self.gathered is not None
        with guarded(self.attempt.channel):
            messages = self.gathered.wait()
        self.attempt.look(messages, watched)
        culprits: set[int] = set()

        def decode() -> None:
            for chunk, message in zip(self.x.split(self.lengths), messages, strict=True):
                if chunk.numel():
                    code = view_code(self.second, message, self.room, chunk.numel(), chunk.dtype)
                    self.second.decode(code, out=chunk)
                    if watched and not torch.isfinite(code.scales.sum()):
                        culprits.update(int(rank) - 1 for rank in code.payload[code.scales.isnan(), 0])

        self.attempt.make(decode)
        self.scattered = self.gathered = None
        return culprits


def mean_over(
    tensors: Sequence[tuple[Tensor, Key]], codecs: Codecs, group: dist.ProcessGroup | None = None, *,
    residuals: Sequence[Residuals | None] | None = None, channel: Channel | None = None,
    piece: int = PIPELINE_ELEMENTS,
) -> list[Residuals | None]:  # fmt: skip
    """Every flat tensor (fp32, bf16, fp16), given with the key of its seeds, becomes the mean over the ranks, in place.

    Arguments:
        codecs: of the two phases.
        residuals: of each tensor, for error feedback: the first as long as the tensor, the second as this rank's chunk
            of it (``chunk_numel``); None: without. A tensor with residuals travels in one piece.
        channel: None is that of the caller's thread; it then says which group.
        piece: elements that travel together.

    Returns the new residuals. Raises, on every rank, FloatingPointError that names the ranks whose tensor is not
    finite, if the first codec has nonfinite="raise"; and GroupError if the ranks differ in what they ask for, or one is
    gone or has failed, which raises its own error.
    """
    channel = channel_of(group) if channel is None else channel
    before = [None] * len(tensors) if residuals is None else list(residuals)
    pair = dataclasses.replace(codecs[0], nonfinite="propagate"), dataclasses.replace(codecs[1], nonfinite="propagate")
    for (x, _), given in zip(tensors, before, strict=True):
        if given is not None:
            _check_residuals(x, given, codecs[0].block, channel)
    pieces: list[_Piece] = []
    fed: dict[int, _Piece] = {}  # by the number of the tensor
    with Attempt(channel) as attempt:
        device = tensors[0][0].device if tensors else torch.device("cpu")
        check_consistent(_request(tensors, codecs, before, piece), device, channel)
        for number, ((x, key), given) in enumerate(zip(tensors, before, strict=True)):
            step = max(1, piece // pair[0].block) * pair[0].block if given is None else max(1, x.numel())
            for start in range(0, x.numel(), step):
                turn = len(pieces) % (TURNS // 2)  # three pieces travel at a time
                pieces.append(_Piece(x[start : start + step], key, pair, attempt, turn, given))
                if given is not None:
                    fed[number] = pieces[-1]
        culprits = _run(pieces, codecs[0].nonfinite == "raise")
    complain(culprits)
    return [fed[number].kept() if number in fed else given for number, given in enumerate(before)]


def _check_residuals(x: Tensor, given: Residuals, block: int, channel: Channel) -> None:
    own = chunk_numel(x.numel(), block, dist.get_rank(channel.group), dist.get_world_size(channel.group))
    if (given[0].numel(), given[1].numel()) != (x.numel(), own):
        raise ValueError(
            f"residuals must have {x.numel()} and {own} elements, got {given[0].numel()} and {given[1].numel()}"
        )


def _request(
    tensors: Sequence[tuple[Tensor, Key]], codecs: Codecs, residuals: Sequence[Residuals | None], piece: int
) -> Request:
    fed = [number for number, given in enumerate(residuals) if given is not None]
    what = "a mean" if piece == PIPELINE_ELEMENTS else f"a mean in pieces of {piece}"
    if fed:
        what += " with feedback" if len(fed) == len(tensors) else f" with feedback in {fed}"
    shapes = tuple((x.numel(), x.dtype) for x, _ in tensors)
    return Request(what, codecs, shapes, tuple(key for _, key in tensors))


def _run(pieces: Sequence[_Piece], watched: bool) -> set[int]:
    """Pieces one after another, three at a time: one is encoded, one averaged, one decoded, while others travel."""
    culprits: set[int] = set()
    for turn in range(len(pieces) + 2):
        if turn < len(pieces):
            pieces[turn].send()
        if 0 < turn <= len(pieces):
            pieces[turn - 1].average()
        if turn > 1:
            culprits |= pieces[turn - 2].receive(watched)
    return culprits


def exact_mean_over(x: Tensor, channel: Channel) -> None:
    """A flat fp32 tensor becomes the mean over the ranks, summed in their order, with messages of a channel's tags."""
    ranks, rank = dist.get_world_size(channel.group), dist.get_rank(channel.group)
    lengths = [chunk_numel(x.numel(), 1, r, ranks) for r in range(ranks)]
    with Attempt(channel):
        check_consistent(Request("a mean in fp32", tensors=((x.numel(), x.dtype),)), x.device, channel)
        sent = torch.zeros(ranks, 4 * lengths[0], dtype=torch.uint8, device=x.device)
        for message, chunk in zip(sent, x.split(lengths), strict=True):
            message[: chunk.nbytes] = chunk.view(torch.uint8)
        with guarded(channel):
            scattered, gathered = (Messages(4 * lengths[0], x.device, channel, turn) for turn in range(2))
            for r in scattered.turns():
                scattered.send(r, sent)
            parts = scattered.wait().view(torch.float32)[:, : lengths[rank]]
        mean = torch.zeros(lengths[0], device=x.device)
        for part in parts:
            mean[: lengths[rank]] += part
        mean.div_(ranks)
        with guarded(channel):
            gathered.send_all(mean.view(torch.uint8))
            messages = gathered.wait().view(torch.float32)
        for chunk, message in zip(x.split(lengths), messages, strict=True):
            chunk.copy_(message[: chunk.numel()])


def complain(culprits: set[int]) -> None:
    """Raises FloatingPointError if there are any."""
    if culprits == {-1}:
        raise FloatingPointError("the mean over the ranks is beyond the range of the codec's scale, no rank's part is")
    if culprits:
        names = ", ".join(str(rank) for rank in sorted(culprits - {-1}))
        raise FloatingPointError(
            f"what rank {names} sent holds numbers that are not finite; nonfinite='propagate' hands them on as NaN"
        )


def pass_round(messages: Tensor, channel: Channel, write: Callable[[], None]) -> None:
    """Row r of ``messages`` [ranks, bytes] becomes rank r's, of which ``write`` makes this rank's own."""
    ranks, rank = len(messages), dist.get_rank(channel.group)
    if messages.is_cuda if channel.tagged is None else not channel.tagged:
        write()
        with guarded(channel):
            all_gather(messages.view(-1), messages[rank].clone(), group=channel.group)
        return
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    group, tag = channel.group, channel.tag(0)  # messages between two ranks arrive in their order
    rows = [messages[(rank - k) % ranks].unsqueeze(0) for k in range(ranks)]  # in the order in which they pass
    for row in rows[1:]:
        expect(row)
    with guarded(channel):
        received: list[Any] = [dist.irecv(row, group=group, group_src=before, tag=tag) for row in rows[1:]]
    write()
    with guarded(channel):
        sent: list[Any] = []
        for row, work, coming in zip(rows[:-1], received, rows[1:], strict=True):
            sent.append(dist.isend(row, group=group, group_dst=after, tag=tag))
            work.wait()
            check_farewells(coming)
        for work in sent:
            work.wait()

"""The wire of the compressed collectives: messages, the pipeline of coding and sending, and what to say when it fails.

A tensor travels in pieces. While one piece is on the wire the next is encoded and the last one decoded. A piece goes in
two legs: every rank sends each other rank that rank's chunk of the piece, encoded; chunks are decoded, averaged in
fp32, encoded again and gathered by all, who decode the same bytes. Codes are of blocks, so what comes out does not
depend on pieces or chunks.

Messages between hosts (gloo) carry tags, so that a thread of its own may exchange beside the collectives of the group
and beside other lanes; a lane is a range of tags.

A message is the payload of a chunk's blocks, then their scales, each padded to 16 bytes: views of one buffer, into
which the codec writes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Code, Codec

PIECE = 1 << 22  # elements: 2 MB at 4 bits: a slow link is busy, and a fast one does not wait for the first piece
Codecs = tuple[Codec, Codec]
Key = tuple[int | str, ...]
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class GroupError(RuntimeError):
    """A collective failed. ``ranks``: those that are missing or disagree, as far as is known; the message says why.

    DDP hands on what its hook raises as a RuntimeError with the same text.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


# --- layout ---------------------------------------------------------------------------------------------------


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


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def message_bytes(codec: Codec, blocks: int) -> int:
    """Bytes of the message that carries so many blocks."""
    return _padded(blocks * codec.packed_bytes) + _padded(blocks * codec.scale_dtype.itemsize)


def view_code(codec: Codec, message: Tensor, blocks: int, numel: int, dtype: torch.dtype) -> Code:
    """The code of ``numel`` elements in a message that has room for ``blocks`` blocks: a view."""
    used, start = -(-numel // codec.block), _padded(blocks * codec.packed_bytes)
    payload = message[: used * codec.packed_bytes].view(used, codec.packed_bytes)
    scales = message[start : start + used * codec.scale_dtype.itemsize].view(codec.scale_dtype)
    return Code(codec, (numel,), dtype, payload, scales)


# --- agreement and failure ------------------------------------------------------------------------------------

_agreed: set[tuple[Any, ...]] = set()
_failures: Counter[str] = Counter()
_counting = threading.Lock()
_TEXT = 640  # bytes a rank says about what it asks for
_LANES, _PIECES = 1 << 20, 16  # first tag of lane 0, above those that users take; tags of a lane


def named(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all ranks."""
    world = dist.group.WORLD if group is None else group
    if world is None:
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    return world


def first_tag(lane: int) -> int:
    """The first of the tags of a lane."""
    return _LANES + lane * _PIECES


def agree(what: str, device: torch.device, group: dist.ProcessGroup | None, lane: int = 0) -> None:
    """Raises GroupError on every rank, naming those that differ, unless all ranks come with the same text.

    Between hosts it is asked in every call, eight bytes from each rank to each other; on GPUs, where to look at an
    answer is to wait, once for a text and group.
    """
    chosen = named(group)
    text = what.encode()
    if device.type != "cpu":
        if (chosen.group_name, what) not in _agreed:
            _compare(_gathered(text[:_TEXT].ljust(_TEXT), device, group), chosen)
            _agreed.add((chosen.group_name, what))
        return
    mine = hashlib.blake2b(text, digest_size=8).digest()
    if len(set(_swapped(mine, group, first_tag(lane) + _PIECES - 1))) > 1:
        _compare(_swapped(text[:_TEXT].ljust(_TEXT), group, first_tag(lane) + _PIECES - 2), chosen)


def _gathered(mine: bytes, device: torch.device, group: dist.ProcessGroup | None) -> list[bytes]:
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    everyone = torch.empty(dist.get_world_size(group), len(mine), dtype=torch.uint8, device=device)
    all_gather(everyone.view(-1), sent, group=group)
    return [bytes(row.tolist()) for row in everyone.cpu()]


def _swapped(mine: bytes, group: dist.ProcessGroup | None, tag: int) -> list[bytes]:
    """What every rank says, in their order; as many bytes from each."""
    leg = _Leg(dist.get_world_size(group), len(mine), torch.device("cpu"), group, tag)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    for rank in leg.turns():
        leg.send(rank, sent)
    return [row.numpy().tobytes() for row in leg.wait()]


def _compare(said: list[bytes], group: dist.ProcessGroup) -> None:
    texts = [each.decode(errors="replace").rstrip() for each in said]
    common = max(texts, key=texts.count)  # the first of the most frequent ones, on every rank
    odd = [dist.get_global_rank(group, r) for r, text in enumerate(texts) if text != common]
    if odd:
        asked = texts[dist.get_group_rank(group, odd[0])]
        raise GroupError(f"rank {odd[0]} asks for {asked}, others for {common}", odd)


@contextmanager
def guarded(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turns what a backend raises into a GroupError that says which ranks are missing."""
    try:
        yield
    except GroupError:
        raise
    except RuntimeError as error:
        raise explain(error, group) from error


def explain(error: RuntimeError, group: dist.ProcessGroup | None, grace_s: float = 3.0) -> GroupError:
    """What a failed collective was about: the ranks that do not report a failure of it too are the ones missing.

    Every rank comes here when its part has failed, and says so in the store. Those that have said nothing after
    ``grace_s`` seconds are down or cannot be reached.
    """
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    name, silent = named(group).group_name, [r for r in ranks if r != rank]
    with _counting:
        _failures[name] += 1  # the other ranks of this group have counted as many
        prefix = f"tq/failed/{name}/{_failures[name]}"
    heard: list[int] = []

    def ask() -> None:
        store, missing, deadline = dist.distributed_c10d._get_default_store(), list(silent), time.monotonic() + grace_s
        store.set(f"{prefix}/{rank}", first)
        while missing and time.monotonic() < deadline:
            missing = [r for r in missing if not store.check([f"{prefix}/{r}"])]
            time.sleep(0.05)
        heard.extend([rank, *(r for r in silent if r not in missing)])

    # a thread, because nothing limits how long a store that cannot be reached is asked
    asking = threading.Thread(target=_quietly(ask), daemon=True)
    asking.start()
    asking.join(grace_s + 2.0)
    if rank not in heard:
        return GroupError(
            f"rank {rank} reaches neither its group nor the store of the job: it is cut off, or the host of the store "
            f"is gone ({first})", [rank]
        )  # fmt: skip
    silent = [r for r in silent if r not in heard]
    who = f"no answer from rank {', '.join(map(str, silent))}" if silent else "all ranks answer"
    return GroupError(f"a collective of rank {rank} failed, {who}: {first}", silent)


def _quietly(call: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with suppress(RuntimeError, OSError):
            call()

    return run


# --- the two legs ---------------------------------------------------------------------------------------------


def encode_owing(codec: Codec, x: Tensor, out: Code, error: Tensor | None) -> Tensor | None:
    """Encodes x, and what is owed on top; returns what is owed now, None where nothing is kept of it."""
    if error is None:
        codec.encode(x, out)
        return None
    owed = x + error
    codec.encode(owed, out)
    return owed.sub_(codec.decode(out))


def encode_mean(parts: Sequence[Code], out: Code, error: Tensor | None = None) -> Tensor | None:
    """Encodes the mean of the ranks' codes of a chunk, summed in fp32 in their order; returns as ``encode_owing``.

    A block that is not finite says in its payload, which has no other use then, whose part it was: rank + 1.
    """
    total = parts[0].codec.decode(parts[0])
    for part in parts[1:]:
        part.codec.decode(part, out=total, accumulate=True)
    if error is None:
        out.codec.encode(total, out, factor=1 / len(parts))
    else:
        error = encode_owing(out.codec, total.div_(len(parts)), out, error)
    if out.scales.is_cuda or not torch.isfinite(out.scales.sum()):
        lost = out.scales.isnan()
        for rank, part in reversed(list(enumerate(parts))):
            out.payload[lost & part.scales.isnan(), 0] = (rank + 1) % 255
    return error


class _Leg:
    """A message from this rank for every rank, and one from every rank for this one: rows of uint8 tensors.

    Between hosts (gloo) all receives are asked for before anything is sent: the request travels on the connection that
    carries this rank's own messages, and behind these it would wait until they have crossed the link, one way after the
    other. On GPUs the collective of the library does it.
    """

    def __init__(self, rows: int, nbytes: int, device: torch.device, group: dist.ProcessGroup | None, tag: int) -> None:
        self.group, self.tag, self.rank = group, tag, dist.get_rank(group)
        self.received = torch.empty(rows, nbytes, dtype=torch.uint8, device=device)
        self.held: list[Tensor] = []  # until they have been sent
        self.works: list[Any] = []
        if device.type == "cpu":
            others = [r for r in range(rows) if r != self.rank]
            self.works = [dist.irecv(self.received[r], group=group, group_src=r, tag=tag) for r in others]

    def turns(self) -> list[int]:
        """The ranks, each rank beginning with another and ending with itself."""
        ranks = len(self.received)
        return [(self.rank + turn) % ranks for turn in range(1, ranks + 1)]

    def send(self, rank: int, message: Tensor) -> None:
        if rank == self.rank:
            self.received[rank].copy_(message)
        else:
            self.works.append(dist.isend(message, group=self.group, group_dst=rank, tag=self.tag))
            self.held.append(message)

    def wait(self) -> Tensor:
        """The messages uint8 [ranks, bytes], in the order of the ranks."""
        for work in self.works:
            work.wait()
        self.works, self.held = [], []
        return self.received


class _Piece:
    """One piece of a tensor on its way to becoming the mean. The codecs propagate what is not finite."""

    def __init__(
        self, x: Tensor, codecs: Codecs, key: Key, group: dist.ProcessGroup | None,
        errors: tuple[Tensor | None, Tensor | None], tag: int = 0,
    ) -> None:  # fmt: skip
        self.x, self.group, self.errors, self.tag = x, group, errors, tag
        ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.firsts, self.second = [codecs[0].derive(*key, 1, r) for r in range(ranks)], codecs[1].derive(*key, 2)
        self.room = chunk_of(x.numel(), codecs[0].block, 0, ranks)[1]  # blocks: no other chunk is larger
        self.lengths = [chunk_numel(x.numel(), codecs[0].block, r, ranks) for r in range(ranks)]

    def send(self) -> None:
        """Encodes a chunk for every rank and sends it off."""
        ranks, codec, on = len(self.lengths), self.firsts[self.rank], self.x.device
        sizes = [message_bytes(chosen, self.room) for chosen in (codec, self.second)]
        self.legs = [_Leg(ranks, size, on, self.group, self.tag + leg) for leg, size in enumerate(sizes)]
        sent = torch.empty(ranks, sizes[0], dtype=torch.uint8, device=on)
        chunks, owed = self.x.split(self.lengths), [torch.empty(0)] * ranks
        errors = [None] * ranks if self.errors[0] is None else self.errors[0].split(self.lengths)
        for r in self.legs[0].turns():
            out = view_code(codec, sent[r], self.room, self.lengths[r], self.x.dtype)
            if self.lengths[r]:
                left = encode_owing(codec, chunks[r], out, errors[r])
                owed[r] = owed[r] if left is None else left
            if not self.x.is_cuda:
                self.legs[0].send(r, sent[r])
        if self.x.is_cuda:
            self.legs[0].works.append(
                dist.all_to_all_single(self.legs[0].received, sent, group=self.group, async_op=True)
            )
            self.legs[0].held.append(sent)
        if self.errors[0] is not None:
            self.errors = torch.cat([part.to(on) for part in owed]), self.errors[1]

    def average(self) -> None:
        """Averages the chunks that the others sent, and sends all the result."""
        received, leg, numel = self.legs[0].wait(), self.legs[1], self.lengths[self.rank]
        mine = torch.empty(leg.received.shape[1], dtype=torch.uint8, device=self.x.device)
        if numel:
            parts = [
                view_code(codec, message, self.room, numel, torch.float32)
                for codec, message in zip(self.firsts, received, strict=True)
            ]
            out = view_code(self.second, mine, self.room, numel, torch.float32)
            self.errors = self.errors[0], encode_mean(parts, out, self.errors[1])
        if self.x.is_cuda:
            leg.works.append(all_gather(leg.received.view(-1), mine, group=self.group, async_op=True))
            leg.held.append(mine)
        else:
            for r in leg.turns():
                leg.send(r, mine)

    def receive(self, watched: bool) -> set[int]:
        """Writes the mean into the piece; where watched, the ranks whose part was not finite (-1: only the mean)."""
        culprits: set[int] = set()
        for chunk, message in zip(self.x.split(self.lengths), self.legs[1].wait(), strict=True):
            if chunk.numel():
                code = view_code(self.second, message, self.room, chunk.numel(), chunk.dtype)
                self.second.decode(code, out=chunk)
                if watched and not torch.isfinite(code.scales.sum()):
                    culprits |= {int(rank) - 1 for rank in code.payload[code.scales.isnan(), 0]}
        self.legs.clear()
        return culprits


def mean_over(
    tensors: Sequence[tuple[Tensor, Key]], codecs: Codecs, group: dist.ProcessGroup | None = None, piece: int = PIECE,
    lane: int = 0,
) -> None:  # fmt: skip
    """Every flat tensor (fp32, bf16, fp16), given with the key of its seeds, becomes the mean over the ranks, in place.

    codecs: of the two legs; lane: whose tags the messages carry. Raises, on every rank, FloatingPointError that names
    the ranks whose tensor is not finite, if the first codec has nonfinite="raise"; and GroupError if the ranks differ
    in what they ask for, or one is gone.
    """
    first, second = (dataclasses.replace(codec, nonfinite="propagate") for codec in codecs)
    step = max(1, piece // first.block) * first.block
    parts = [(x[start : start + step], key) for x, key in tensors for start in range(0, x.numel(), step)]
    tags = [first_tag(lane) + 2 * turn for turn in range(4)]  # in turn, as three pieces travel at a time
    pieces = [
        _Piece(x, (first, second), key, group, (None, None), tags[number % 4]) for number, (x, key) in enumerate(parts)
    ]
    with guarded(group):
        agree(_wanted(tensors, codecs), tensors[0][0].device if tensors else torch.device("cpu"), group, lane)
        culprits = _through(pieces, codecs[0].nonfinite == "raise")
    complain(culprits)


def _wanted(tensors: Sequence[tuple[Tensor, Key]], codecs: Codecs) -> str:
    sizes = ", ".join(f"{x.numel()} x {x.dtype}" for x, _ in tensors).replace("torch.", "") or "nothing"
    keys = ", ".join("/".join(map(str, key)) for _, key in tensors)
    both = f"{codecs[0]}" if codecs[0] == codecs[1] else f"{codecs[0]} and {codecs[1]}"
    return f"{both} for {sizes[:200]}, step {keys[:80]} ({hashlib.blake2b((keys + sizes).encode()).hexdigest()[:8]})"


def exact_mean_over(x: Tensor, group: dist.ProcessGroup | None = None, lane: int = 0) -> None:
    """A flat fp32 tensor becomes the mean over the ranks, summed in their order, with messages of a lane's tags."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = [chunk_numel(x.numel(), 1, r, ranks) for r in range(ranks)]
    with guarded(group):
        agree(f"a mean of {x.numel()} in fp32", x.device, group, lane)
        room = 4 * lengths[0]
        legs = [_Leg(ranks, room, x.device, group, first_tag(lane) + leg) for leg in range(2)]
        for r, chunk in zip(legs[0].turns(), [x.split(lengths)[r] for r in legs[0].turns()], strict=True):
            message = torch.zeros(room, dtype=torch.uint8)
            message[: 4 * lengths[r]] = chunk.view(torch.uint8)
            legs[0].send(r, message)
        parts = legs[0].wait().view(torch.float32)[:, : lengths[rank]]
        mean = torch.zeros(lengths[0])
        for part in parts:
            mean[: lengths[rank]] += part
        mean.div_(ranks)
        for r in legs[1].turns():
            legs[1].send(r, mean.view(torch.uint8))
        for chunk, message in zip(x.split(lengths), legs[1].wait().view(torch.float32), strict=True):
            chunk.copy_(message[: chunk.numel()])


def owing_mean_over(
    x: Tensor, codecs: Codecs, key: Key, errors: tuple[Tensor, Tensor], group: dist.ProcessGroup | None = None,
    lane: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``mean_over`` of one tensor with error feedback: returns what the two legs owe now (the second: of this rank's
    chunk of the whole tensor, so it travels in one piece)."""
    first, second = (dataclasses.replace(codec, nonfinite="propagate") for codec in codecs)
    own = chunk_numel(x.numel(), first.block, dist.get_rank(group), dist.get_world_size(group))
    if (errors[0].numel(), errors[1].numel()) != (x.numel(), own):
        raise ValueError(
            f"errors must have {x.numel()} and {own} elements, got {errors[0].numel()} and {errors[1].numel()}"
        )
    piece = _Piece(x, (first, second), key, group, errors, first_tag(lane))
    with guarded(group):
        agree(f"{_wanted([(x, key)], codecs)} with feedback", x.device, group, lane)
        culprits = _through([piece], codecs[0].nonfinite == "raise")
    complain(culprits)
    assert piece.errors[0] is not None and piece.errors[1] is not None
    return piece.errors[0], piece.errors[1]


def _through(pieces: Sequence[_Piece], watched: bool) -> set[int]:
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


def complain(culprits: set[int]) -> None:
    """Raises FloatingPointError if there are any."""
    if culprits == {-1}:
        raise FloatingPointError("the mean over the ranks is beyond the range of the codec's scale, no rank's part is")
    if culprits:
        named = ", ".join(str(rank) for rank in sorted(culprits - {-1}))
        raise FloatingPointError(
            f"what rank {named} sent holds numbers that are not finite; nonfinite='propagate' hands them on as NaN"
        )

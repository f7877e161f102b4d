"""What ranks do so that none of them goes on apart: they compare what they ask for, and say what went wrong, and whose.

Before a collective the ranks compare what each asks for (``check_consistent``). When one fails, each rank leaves a note
in the store of the group and reads those of the others (``explain``). An error of one rank alone (out of memory, say)
is not one of the collective: that rank sends what it owes, marked as unmade, and raises its own error; the others
name it (``Attempt``).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Codec
from tq.train.comm.channels import TURNS, Channel, Messages
from tq.train.comm.layout import Key, unmade, unmake

_T = TypeVar("_T")
CHECKS = ("each", "once")
EVERY = 64  # calls of a channel after which "once" compares again, keys and all
REMEMBERED = 1024  # configurations of a channel; the oldest is forgotten, on all ranks alike
GRACE_S = 3.0  # for the notes of the other ranks


class GroupError(RuntimeError):
    """A collective failed. ``ranks``: those that are missing, disagree or failed, as far as is known; the message says
    why. DDP hands on what its hook raises as a RuntimeError with the same text."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


# --- the same on all ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a rank asks for: the same on all ranks, or something is wrong.

    what: in words. codecs: of its phases. tensors: (elements, dtype) of each. keys: names of their seeds, which are
    others in every step; the rest is the *configuration*.
    """

    what: str
    codecs: tuple[Codec, ...] = ()
    tensors: tuple[tuple[int, torch.dtype], ...] = ()
    keys: tuple[Key, ...] = ()

    def configuration(self) -> bytes:
        """Eight bytes that name it."""
        return _digest(self.what, self.codecs, self.tensors)

    def fields(self) -> dict[str, Any]:
        """As JSON values."""
        tensors = [f"{numel} x {dtype}".replace("torch.", "") for numel, dtype in self.tensors]
        codecs = [repr(codec) for codec in self.codecs]
        return {"what": self.what, "codecs": codecs, "tensors": tensors, "keys": [list(key) for key in self.keys]}


@lru_cache(256)
def _digest(*configuration: object) -> bytes:
    return hashlib.blake2b(repr(configuration).encode(), digest_size=8).digest()


def check_consistent(asked: Request, device: torch.device, channel: Channel, checks: str | None = None) -> None:
    """Raises GroupError on every rank, naming those that differ, unless all ranks come with the same request.

    checks: "each": in each call, sixteen bytes from each rank to each other. "once": in the first call of a
    configuration and in every ``EVERY``-th call of the channel, as on GPUs, where to look at an answer is to wait.
    None: as the channel says, or the device wants.
    """
    if channel.failed is not None:  # messages of that collective may still lie in it
        ranks = channel.failed.ranks if isinstance(channel.failed, GroupError) else ()
        raise GroupError(f"an earlier collective failed, and its group with it: {channel.failed}", ranks)
    channel.calls += 1
    channel.asked = asked
    if channel.noted == channel.calls:  # a note that this rank would be missing, and here it is
        _within(2.0, lambda: _forget_note(channel))
    configuration = asked.configuration()
    chosen = checks or channel.checks or ("each" if device.type == "cpu" else "once")
    if chosen not in CHECKS:
        raise ValueError(f"checks must be one of {', '.join(CHECKS)}, got {chosen!r}")
    if chosen == "once" and configuration in channel.agreed and channel.calls % EVERY:
        return
    mine = configuration + hashlib.blake2b(repr(asked.keys).encode(), digest_size=8).digest()
    with guarded(channel):
        said = _swap(mine, device, channel, TURNS)
        if len(set(said)) > 1:
            raise _difference(channel, said, _swap_fields(asked, device, channel))
    if chosen == "once":
        channel.agreed[configuration] = None
        if len(channel.agreed) > REMEMBERED:
            del channel.agreed[next(iter(channel.agreed))]


def _swap(mine: bytes, device: torch.device, channel: Channel, turn: int) -> list[bytes]:
    """What every rank says, in their order; as many bytes from each."""
    messages = Messages(len(mine), device, channel, turn)
    messages.send_all(torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device))
    return [row.numpy().tobytes() for row in messages.wait().cpu()]


def _swap_fields(asked: Request, device: torch.device, channel: Channel) -> list[dict[str, Any]]:
    mine = json.dumps(asked.fields()).encode()
    lengths = _swap(len(mine).to_bytes(8, "big"), device, channel, TURNS + 1)
    longest = max(int.from_bytes(length, "big") for length in lengths)
    return [json.loads(fields) for fields in _swap(mine.ljust(longest), device, channel, TURNS + 2)]


def _difference(channel: Channel, said: Sequence[Any], fields: Sequence[dict[str, Any]]) -> GroupError:
    """said: equal where the requests are; both in the order of the ranks."""
    common = max(said, key=said.count)  # the first of the most frequent ones, on every rank
    odd = [r for r, each in enumerate(said) if each != common]
    one, others = fields[odd[0]], fields[said.index(common)]
    ranks = [dist.get_global_rank(channel.group, r) for r in odd]
    return GroupError(f"rank {ranks[0]} asks for {_in_words(one, others)}, others for {_in_words(others, one)}", ranks)


def _in_words(asked: dict[str, Any], beside: dict[str, Any]) -> str:
    text: str = asked["what"]
    if asked["tensors"] or asked["codecs"]:
        text += f" of {_listed(asked['tensors'], beside['tensors']) or 'nothing'}"
    if asked["codecs"]:
        text += f" by {' and '.join(dict.fromkeys(asked['codecs']))}"
    keys, others = (["/".join(map(str, key)) for key in each["keys"]] for each in (asked, beside))
    return text + (f", step {_listed(keys, others)}" if keys else "")


def _listed(entries: list[str], beside: list[str]) -> str:
    """Of a long list only the first entry in which it differs from the other."""
    if len(entries) <= 4:
        return ", ".join(entries)
    pairs = zip(entries, [*beside, *[None] * len(entries)], strict=False)
    at = next((number for number, (mine, other) in enumerate(pairs) if mine != other), 0)
    return f"{entries[at]} (number {at} of {len(entries)})"


# --- failure --------------------------------------------------------------------------------------------------


class Attempt:
    """Around the collectives of one request: an error of this rank alone leaves no other rank waiting.

    What ``make`` raises is kept for the end. Until then this rank goes on sending, messages that are marked as unmade,
    and the others learn from these who failed; they all come out in good order, and the channel can be used again.
    At the end this rank raises its own error and the others GroupError. On GPUs, where to look at a mark is to wait,
    the others get NaN instead. An error that ends this rank's part at once stands in its note.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.error: Exception | None = None
        self.failed: set[int] = set()
        self.sent = False  # whether the others have been told

    def make(self, write: Callable[[], object], message: Tensor | None = None) -> None:
        """Runs what may fail on one rank alone; it may write a message, or several that are not sent before."""
        if self.error is None:
            try:
                write()
            except Exception as error:
                self.error = error
                _leave_note(self.channel, error, call=0)
        if message is not None and self.error is not None:
            unmake(message)
            self.sent = True

    def look(self, messages: Tensor, always: bool = False) -> None:
        """Whose messages, uint8 [ranks, bytes], are marked; on GPUs only where it is asked for ``always``."""
        if always or messages.device.type == "cpu":
            self.failed.update(unmade(messages))

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GroupError) and self.error is not None:
            raise self.error from error
        if isinstance(error, Exception) and not isinstance(error, GroupError):
            _leave_note(self.channel, error, call=0)
            _leave_note(self.channel, error, call=1)
            _give_up(self.channel, error)
        elif error is None and self.error is not None:
            if not self.sent:  # too late for them to notice: they will miss this rank in their next call
                _leave_note(self.channel, self.error, call=1)
            raise self.error
        elif error is None and self.failed:
            raise self._blame()

    def _blame(self) -> GroupError:
        ranks = [dist.get_global_rank(self.channel.group, rank) for rank in sorted(self.failed)]
        notes = _within(2.0, lambda: _notes(self.channel, ranks, 1.0)) or {}
        return _failed({rank: notes.get(rank, {"said": "its own error says why"}) for rank in ranks})


@contextmanager
def guarded(channel: Channel) -> Iterator[None]:
    """Around calls of ``torch.distributed`` alone: what they raise becomes a GroupError that says whose fault it is."""
    try:
        yield
    except (GroupError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        _give_up(channel, error)
        channel.failed = explain(error, channel)
        raise channel.failed from error


def _give_up(channel: Channel, error: Exception) -> None:
    """Ends a channel: tells all ranks that nothing more will come, as one that waits for this one sees nothing else."""
    channel.failed = error
    for rank in range(dist.get_world_size(channel.group)):
        if rank != dist.get_rank(channel.group):
            channel.say_farewell(rank)


def explain(error: RuntimeError, channel: Channel) -> GroupError:
    """What a failed collective was about: the ranks that do not report a failure of it too are the ones missing.

    Every rank comes here when its part has failed, and leaves a note of what it asked for. Of those that have left none
    after ``GRACE_S`` seconds the ones that cannot be reached are down; if all can be, all are missing. A rank may be a
    call ahead of another that lacks a message.
    """
    first, rank, members = _first_line(error), dist.get_rank(), dist.get_process_group_ranks(channel.group)

    def ask() -> dict[int, dict[str, Any]]:
        _write_note(channel, channel.calls, first, own=False)
        return _notes(channel, members, GRACE_S)

    notes = _within(GRACE_S + 2.0, ask)
    if notes is None:
        return GroupError(
            f"rank {rank} reaches neither its group nor the store of the job: it is cut off, or the host of the store "
            f"is gone ({first})", [rank]
        )  # fmt: skip
    silent = [r for r in members if r not in notes]
    gone = [r for r in silent if not channel.say_farewell(dist.get_group_rank(channel.group, r))] or silent
    late = [r for r in silent if r not in gone]
    failed = {r: note for r, note in notes.items() if note["own"] and (note["ahead"] == 0 or not silent)}
    if failed and not silent:
        return _failed(failed)
    if silent:
        who = f"no answer from rank {', '.join(map(str, gone))}"
        if late := [r for r in silent if r not in gone]:
            who += f", and none within {GRACE_S:g} s from rank {', '.join(map(str, late))}, which can be reached"
        begin = f"{_failed(failed)}; {who}" if failed else f"a collective of rank {rank} failed, {who}"
        return GroupError(f"{begin}: {first}", sorted([*failed, *gone]))
    fields = [notes[r]["asked"] for r in members]
    if not any(note["ahead"] for note in notes.values()) and any(each != fields[0] for each in fields):
        return _difference(channel, fields, fields)
    return GroupError(f"a collective of rank {rank} failed, all ranks answer: {first}")


def _failed(notes: dict[int, dict[str, Any]]) -> GroupError:
    """notes: of the ranks that failed by an error of their own."""
    ranks = sorted(notes)
    return GroupError(f"rank {', '.join(map(str, ranks))} failed: {notes[ranks[0]]['said']}", ranks)


# --- notes in the store ---------------------------------------------------------------------------------------


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _note_key(channel: Channel, call: int, rank: int) -> str:
    return f"tq/failed/{channel.number}/{call}/{rank}"  # all ranks count the calls of a channel alike


def _write_note(channel: Channel, call: int, said: str, own: bool) -> None:
    note = {"own": own, "said": said, "asked": None if channel.asked is None else channel.asked.fields()}
    channel.group.get_group_store().set(_note_key(channel, call, dist.get_rank()), json.dumps(note))


def _leave_note(channel: Channel, error: Exception, call: int) -> None:
    """Says that this rank alone failed, and is missed in this call (0) or the next one (1)."""
    said = f"{type(error).__name__}: {_first_line(error)}"
    channel.noted = channel.calls + call
    _within(2.0, lambda: _write_note(channel, channel.noted, said, own=True))


def _forget_note(channel: Channel) -> None:
    channel.group.get_group_store().delete_key(_note_key(channel, channel.calls, dist.get_rank()))


def _notes(channel: Channel, ranks: Sequence[int], grace_s: float) -> dict[int, dict[str, Any]]:
    """What these ranks have left for the last call, at most ``grace_s`` seconds from now.

    Else for the next one, or, of a collective that failed, for the one before: "ahead" is 1 or -1 then, not 0.
    """
    store, deadline = channel.group.get_group_store(), time.monotonic() + grace_s
    found: dict[int, dict[str, Any]] = {}
    while True:
        found = {rank: note for rank, note in found.items() if not note["own"]}  # it may be here after all
        for rank, ahead in itertools.product(set(ranks) - set(found), (-1, 1, 0)):
            key = _note_key(channel, channel.calls + ahead, rank)
            if store.check([key]):
                note = json.loads(store.get(key))
                if ahead >= 0 or not note["own"]:  # it has failed alone and goes on
                    found[rank] = {**note, "ahead": ahead}
        if len(found) == len(ranks) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """What a call returns; None if it fails or takes longer. In a thread, because nothing limits how long a store that
    cannot be reached is asked."""
    found: list[_T] = []

    def run() -> None:
        with suppress(RuntimeError, OSError):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None

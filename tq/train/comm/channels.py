"""Channels: each carries collectives in one order, apart from those of the others and of the group's own users.

Messages between hosts (gloo) carry tags, and a channel is a range of tags; so a thread of its own may exchange beside
the collectives of the group. Where there are no tags (NCCL) a channel with a thread has a process group of its own.
All ranks of a group make their channels in the same order. What is known of a channel goes when its group does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from tq.train import _torch_private

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_FIRST, _TAGS = 1 << 20, 16  # first tag of channel 0, above those that users take; tags of a channel
TURNS = 8  # tags of messages of the pipeline; the others are for what ranks say about themselves
_FAREWELL, _LENGTH = 254, 8  # bytes that a rank receives for the messages of one whose part has failed; how many
DIRECT, BEHIND, _OWN = 0, 1, 2  # numbers: the caller's thread, what was started with async_op, the first of one owner


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all ranks; RuntimeError where there is none."""
    world = dist.group.WORLD if group is None else group
    if world is None:
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    return world


class Channel:
    """One order of collectives in a group.

    Attributes:
        number: 0 is that of the caller's own thread, which has no other; 1 that of ``async_op``; others have an owner.
        calls: collectives begun, the same number on all ranks. asked: what the last one is. noted: the one that this
            rank said it would miss. agreed: configurations that all ranks were seen to ask for, oldest first. (All four
            belong to ``agreement``.) failed: the error after which it can carry no more.
        checks, tagged: how ranks compare what they ask for, and how messages travel; None: as the device wants it
            (``agreement.check_consistent``, ``Messages``).
    """

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        self.number, self.calls, self.noted = number, 0, 0
        self.asked: Any = None
        self.failed: Exception | None = None
        self._farewells: list[Any] = []  # on their way as long as they are held
        self.agreed: dict[bytes, None] = {}
        self.checks: str | None = None
        self.tagged: bool | None = None
        self._group, self._own = ref(group), None
        self._streams: dict[torch.device, Any] = {}
        self._thread = ThreadPoolExecutor(1, "tq-collectives") if number != DIRECT else None
        if number != DIRECT and dist.get_backend(group) == "nccl":  # no tags: what one group does has one order
            waits = _torch_private.timeout(group, torch.device("cuda"))
            members = dist.get_process_group_ranks(group)
            self._own = dist.new_group(members, waits, "nccl", use_local_synchronization=True)

    @property
    def group(self) -> dist.ProcessGroup:
        """Where its collectives run; RuntimeError once that was destroyed."""
        group = self._own or self._group()
        if group is None:
            raise RuntimeError(f"channel {self.number}: its process group was destroyed")
        return group

    def tag(self, turn: int) -> int:
        """One of its tags, 0 to 15."""
        return _FIRST + self.number * _TAGS + turn

    def say_farewell(self, rank: int) -> bool:
        """Tells a rank, whichever message it waits for, that nothing more will come; False if it cannot be reached."""
        farewell = torch.full((_LENGTH,), _FAREWELL, dtype=torch.uint8)
        try:
            for turn in range(_TAGS):
                self._farewells.append(dist.isend(farewell, group=self.group, group_dst=rank, tag=self.tag(turn)))
        except RuntimeError:
            return False
        self._farewells.append(farewell)
        return True

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Runs it in the channel's thread, after what was submitted before."""
        assert self._thread is not None
        return self._thread.submit(call)

    def stream(self, device: torch.device) -> Any:
        """The CUDA stream of its collectives on a device: one, made when it is first asked for."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


_channels: WeakKeyDictionary[dist.ProcessGroup, dict[int, Channel]] = WeakKeyDictionary()
_making = threading.Lock()


def channel_of(group: dist.ProcessGroup | None, number: int = DIRECT) -> Channel:
    """Channel 0 or 1 of a group (None: of all ranks): always the same one."""
    chosen = resolve_group(group)
    with _making:
        known = _channels.setdefault(chosen, {})
        if number not in known:
            known[number] = Channel(chosen, number)
        return known[number]


def new_channel(group: dist.ProcessGroup | None) -> Channel:
    """One that nobody else uses."""
    chosen = resolve_group(group)
    with _making:
        known = _channels.setdefault(chosen, {})
        number = max([_OWN - 1, *known]) + 1
        known[number] = Channel(chosen, number)
        return known[number]


class Messages:
    """A message from this rank for every rank, and one from every rank for this one: rows of uint8 tensors.

    Tagged ones go from rank to rank, and all receives are asked for before anything is sent: the request travels on
    the connection that carries this rank's own messages, and behind these it would wait until they have crossed the
    link, one way after the other. Else, on GPUs, a collective of the library does it.
    """

    def __init__(self, nbytes: int, device: torch.device, channel: Channel, turn: int) -> None:
        self.group, self.tag = channel.group, channel.tag(turn)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.tagged = device.type == "cpu" if channel.tagged is None else channel.tagged
        try:
            self.received = torch.empty(self.ranks, nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # on a CPU it does not say by its type that this rank alone is to blame
            raise torch.OutOfMemoryError(str(error)) from error
        self.held: list[Tensor] = []  # until they have been sent
        self.works: list[Any] = []
        if self.tagged:
            expect(self.received)
            others = [r for r in range(self.ranks) if r != self.rank]
            self.works = [dist.irecv(self.received[r], group=self.group, group_src=r, tag=self.tag) for r in others]

    def turns(self) -> list[int]:
        """The ranks, each rank beginning with another and ending with itself."""
        return [(self.rank + turn) % self.ranks for turn in range(1, self.ranks + 1)]

    def send(self, rank: int, sent: Tensor) -> None:
        """Row ``rank`` of ``sent`` [ranks, bytes] is ready; in the order of ``turns``."""
        if self.tagged:
            self._send(rank, sent[rank])
        elif rank == self.rank:  # the last of them
            self.works.append(dist.all_to_all_single(self.received, sent, group=self.group, async_op=True))
            self.held.append(sent)

    def send_all(self, message: Tensor) -> None:
        """The same message for every rank."""
        if self.tagged:
            for rank in self.turns():
                self._send(rank, message)
        else:
            self.works.append(all_gather(self.received.view(-1), message, group=self.group, async_op=True))
            self.held.append(message)

    def _send(self, rank: int, message: Tensor) -> None:
        if rank == self.rank:
            self.received[rank].copy_(message)
        else:
            self.works.append(dist.isend(message, group=self.group, group_dst=rank, tag=self.tag))
            self.held.append(message)

    def wait(self) -> Tensor:
        """The messages uint8 [ranks, bytes], in the order of the ranks; RuntimeError if one of them has given up."""
        for work in self.works[: self.ranks - 1]:
            work.wait()
        if self.tagged:  # before the sends, which a rank that has given up does not receive
            check_farewells(self.received)
        for work in self.works[self.ranks - 1 :]:
            work.wait()
        self.works, self.held = [], []
        return self.received


def expect(messages: Tensor) -> None:
    """Makes rows of uint8 [rows, bytes] ready to receive: a farewell, which is shorter, then ends as it begins."""
    messages[:, -_LENGTH:] = _FAREWELL


def check_farewells(messages: Tensor) -> None:
    """Raises RuntimeError if instead of one of them its sender's farewell came."""
    if messages.shape[1] and (ended := messages[:, -_LENGTH:].eq(_FAREWELL).all(1)).any():
        raise RuntimeError(f"rank {', '.join(map(str, ended.nonzero().flatten().tolist()))} of the group gave up")

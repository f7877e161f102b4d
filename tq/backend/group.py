"""The process group behind the backend: coded where it helps, and gloo or NCCL for all the rest.

What is coded runs in one thread of the group, in the order of the calls, over a gloo or NCCL group of its own that is
made at the first such call; so a coded collective is under way while its caller goes on, as with DDP's hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.backend._torch_private import NEW_NAMES, FutureWork, Works, plain_group
from tq.backend.coded import gather_codes, scatter_codes
from tq.backend.counts import Counts
from tq.backend.settings import Config, configured
from tq.backend.warmup import Warmup
from tq.train.collectives import ReduceScatter
from tq.train.comm.agreement import GroupError
from tq.train.comm.layout import code_bytes
from tq.train.comm.pipeline import mean_over
from tq.train.comm.plain import scatter_sums

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MADE = (1 << 19) + 1  # tag of what ranks say of a group, above those that users take
_PROTOCOL = 2  # of what ranks send each other: ranks of another one are refused
FORWARDED = (
    "allgather", "allgather_coalesced", "alltoall", "barrier", "broadcast", "gather", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "scatter", "send", "all_gather_single_coalesced",
)  # fmt: skip
_alive: weakref.WeakSet[CodedGroup]


class CodedGroup(dist.ProcessGroup):
    """A group whose large sums and means are coded.

    Attributes:
        config: what is coded, and how; the same on all ranks.
        counts: of bytes.
        calls: coded collectives so far; they select the seeds.
        warmup: the first steps, whose sums are exact.
    """

    def __init__(self, options: Any, config: Config) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.config, self.counts, self.calls = config, Counts(), 0
        self._store, self._timeout = options.store, options.timeout
        # PyTorch names no ranks of the group of all
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._named = str(options.group_id)
        self._plain = plain_group(self._store, self.rank(), self.size(), self._timeout)
        self._own: dict[str, dist.ProcessGroup] = {}  # of coded traffic, by kind of device
        self._thread = ThreadPoolExecutor(1, f"tq-backend-{self._named}")
        self._scatter = ReduceScatter(config.codec)
        self._compare()
        self.warmup = self._first_steps(config.warmup)
        _alive.add(self)

    @staticmethod
    def alive() -> list[CodedGroup]:
        """All groups that were not shut down, in the order of their names."""
        return sorted(_alive, key=lambda group: group.group_name)

    def _compare(self) -> None:
        """GroupError on all ranks where one has other settings."""
        mine = f"protocol {_PROTOCOL}, {self.config.said()}"
        self._store.set(f"tq/{self.rank()}", mine)
        others = [self._store.get(f"tq/{rank}").decode() for rank in range(self.size())]
        if len(set(others)) > 1:
            other = next(rank for rank, said in enumerate(others) if said != others[0])
            raise GroupError(f"backend tq: rank 0 has {others[0]}, rank {other} has {others[other]}")

    def resume(self, calls: int) -> None:
        """Go on after so many coded collectives, past the first steps; from 0 on, begin anew with them."""
        self.warmup.end()
        self.calls, self.warmup = calls, self._first_steps(0 if calls else self.config.warmup)

    def _first_steps(self, steps: int) -> Warmup:
        return Warmup(self._plain, self.rank(), steps if self.size() > 1 else 0)

    # --- what PyTorch asks of a group ---

    @property
    def group_name(self) -> Any:
        return self._named

    @property
    def pg_name(self) -> str:
        return self._named

    def getBackendName(self) -> str:  # noqa: N802
        return "tq"

    def _get_backend(self, device: torch.device) -> Any:
        return self._plain._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        found: list[torch.device] = self._plain._device_types
        return found

    def shutdown(self) -> None:
        """Wait for what is under way and release the groups within."""
        self._thread.shutdown()
        self.warmup.end()
        self._plain = None
        self._own.clear()
        _alive.discard(self)

    abort = shutdown

    # --- what is coded ---

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        return self._all_reduce("allreduce", tensors, opts, *rest)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        return self._all_reduce("allreduce_coalesced", tensors, opts, *rest)

    def _all_reduce(self, name: str, tensors: Any, opts: Any, *rest: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        plain = 2 * self._share() * sum(x.nbytes for x in given)
        if not self._coded("all_reduce", given, getattr(opts, "reduceOp", opts)):
            self.counts.add("all_reduce", plain)
            return self._forward(name, tensors, opts, *rest)
        key, codec, group = self._next(), self.config.codec, self._group_of(given[0].device)
        summed = _is(getattr(opts, "reduceOp", opts), dist.ReduceOp.SUM)
        self.counts.add("all_reduce", plain, 2 * self._share() * sum(code_bytes(codec, x.numel()) for x in given))

        def run() -> list[Tensor]:
            flats = [x.detach().view(-1) for x in given]
            mean_over([(flat, (key, number)) for number, flat in enumerate(flats)], (codec, codec), group)
            if summed:
                for flat in flats:
                    flat.mul_(self.size())
            return given

        return self._started(run)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        plain = self._share() * given.nbytes
        asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        op = dist.ReduceOp.SUM if _is(asked, dist.ReduceOp.SUM) else dist.ReduceOp.AVG
        if not self._coded("reduce_scatter", [given], asked):
            self.counts.add("reduce_scatter", plain)
            if given.device.type == "cpu" and self._fits([given], asked):  # gloo's own sends twice as much
                pairs = self._group_of(given.device)
                return self._started(lambda: scatter_sums(output, given, op, pairs))
            return self._forward("reduce_scatter_single", output, given, opts)
        key, group = self._next(), self._group_of(given.device)
        nbytes = (self.size() - 1) * code_bytes(self.config.codec, output.numel())
        self.counts.add("reduce_scatter", plain, nbytes)

        def run() -> Tensor:
            self._scatter.step = key
            self._scatter(output, given, group, op)
            return output

        return self._started(run)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return Works([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, given, strict=True)])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        plain = (self.size() - 1) * given.nbytes
        if not self._coded("all_gather", [given]):
            self.counts.add("all_gather", plain)
            return self._forward("all_gather_single", output, given, opts)
        key, codec, group = self._next(), self.config.codec, self._group_of(given.device)
        self.counts.add("all_gather", plain, (self.size() - 1) * code_bytes(codec, given.numel()))
        return self._started(lambda: gather_codes(output, given, codec, key, group))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Any:
        plain = self._share() * given.nbytes
        if received or sent or not self._coded("all_to_all", [given]):
            self.counts.add("all_to_all", plain)
            return self._forward("all_to_all_single", output, given, received, sent, opts)
        key, codec, group = self._next(), self.config.codec, self._group_of(given.device)
        each = code_bytes(codec, given.numel() // self.size())
        self.counts.add("all_to_all", plain, (self.size() - 1) * each)
        return self._started(lambda: scatter_codes(output, given, codec, key, group))

    # --- pieces ---

    def _coded(self, kind: str, given: Sequence[Tensor], op: Any = dist.ReduceOp.SUM) -> bool:
        """Whether a collective is coded: by what all ranks know alike."""
        if kind not in self.config.codes or not self._fits(given, op):
            return False
        return not self.warmup.exact()

    def _fits(self, given: Sequence[Tensor], op: Any) -> bool:
        """Whether it is a sum or mean, or no reduction at all, of enough floats, of several ranks."""
        known = self.size() > 1 and (op is None or any(_is(op, each) for each in _SUMS))
        floats = all(x.dtype in _FLOATS and x.layout == torch.strided and x.is_contiguous() for x in given)
        return known and floats and sum(x.numel() for x in given) >= max(1, self.config.min_numel)

    def _share(self) -> float:
        return (self.size() - 1) / self.size()

    def _next(self) -> int:
        self.calls += 1
        return self.calls - 1

    def _group_of(self, device: torch.device) -> dist.ProcessGroup:
        """For coded traffic; all ranks make it at the same call, and in the thread that calls."""
        if device.type not in self._own:
            backend = "nccl" if device.type == "cuda" else "gloo"
            make = partial(
                dist.new_group, self._ranks, self._timeout, backend, use_local_synchronization=True,
                group_desc="tq-coded",
            )  # fmt: skip
            self._own[device.type] = self._watched(make)
        return self._own[device.type]

    def _watched(self, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        """What all ranks make together; GroupError at once if one of them dies before it has.

        To make a group is to wait in the store, as long as the timeout, for a rank that will not come. So this is done
        in a thread, and meanwhile each other rank is listened to, by a connection that its death would close.
        """
        ended: SimpleQueue[tuple[int, dist.ProcessGroup | Exception | None]] = SimpleQueue()
        others = [rank for rank in range(self.size()) if rank != self.rank()]

        def work() -> None:
            made: dist.ProcessGroup | Exception
            try:
                made = make()
            except Exception as error:  # noqa: BLE001
                made = error
            with suppress(RuntimeError):
                for rank in others:
                    self._plain.send([torch.zeros(1)], rank, _MADE).wait()
            ended.put((self.rank(), made))

        def listen(rank: int) -> None:
            try:
                self._plain.recv([torch.zeros(1)], rank, _MADE).wait()
                ended.put((rank, None))
            except RuntimeError as error:
                ended.put((rank, error))

        calls: list[Callable[[], None]] = [work, *(partial(listen, rank) for rank in others)]
        for call in calls:
            Thread(target=call, daemon=True).start()
        group: dist.ProcessGroup | None = None
        for _ in range(self.size()):
            rank, said = ended.get()
            if isinstance(said, Exception):
                number, first = self._ranks[rank], str(said).partition("\n")[0]
                raise GroupError(f"rank {number} failed while the group for coded traffic was made: {first}", [number])
            group = group or said
        assert group is not None
        return group

    def _started(self, run: Callable[[], Any]) -> Any:
        """Work of the group's thread; its error is raised where it is waited for."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def answer() -> None:
            try:
                future.set_result(run())
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)

        self._thread.submit(answer)
        return FutureWork(future)

    def _forward(self, name: str, *given: Any, **named: Any) -> Any:
        call = getattr(self._plain, name, None) or getattr(self._plain, NEW_NAMES[name])
        return call(*(each for each in given if each is not None), **named)


_alive = weakref.WeakSet()
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def _is(op: Any, known: Any) -> bool:
    """``op in (SUM, AVG)`` is False for the type that PyTorch hands over."""
    return bool(op == known)


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: CodedGroup, *given: Any, **named: Any) -> Any:
        return self._forward(name, *given, **named)

    call.__name__, call.__doc__ = name, "As gloo or NCCL does it."
    return call


for _name in FORWARDED:
    setattr(CodedGroup, _name, _forwarded(_name))
for _name, _old in NEW_NAMES.items():
    setattr(CodedGroup, _old, getattr(CodedGroup, _name))


def create(options: Any, _: Any = None) -> CodedGroup:
    """What ``init_process_group`` calls for a group of this backend."""
    return CodedGroup(options, configured())

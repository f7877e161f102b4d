"""Means over ranks, exact or compressed: of tensors, of DDP's and FSDP2's gradients, and of what an optimizer asks for.

The compressed all-reduce has two legs. Every rank encodes its tensor and sends each other rank that rank's chunk; the
chunks are decoded and averaged in fp32, encoded again and sent to all, who decode the same bytes. The first leg's seed
is the rank's own, so that the errors of the ranks are independent; the second is shared. Bytes a rank sends:
(n - 1)/n of the tensor's code in each leg, where a ring all-reduce sends (n - 1)/n of its 4 bytes an element twice.

    all_reduce(x, Codec())                                       # in place
    model.register_comm_hook(HookState(Codec()), ddp_hook)       # DistributedDataParallel
    fsdp_module.set_custom_reduce_scatter(ReduceScatter(Codec()))  # FSDP2

An optimizer asks by yielding a ``Mean``; the answer is written into it. So the same code runs on one rank of a process
group, alone, or as one of several workers simulated in a process, where only the wire is missing.
"""

# no postponed annotations: DDP looks at those of its hooks
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import DTYPES, Code, Codec
from tq.train.exchange import (
    Codecs,
    GroupError,
    Key,
    agree,
    all_gather,
    chunk_numel,
    chunk_of,
    code_bytes,
    encode_mean,
    encode_owing,
    exact_mean_over,
    first_tag,
    guarded,
    mean_over,
    message_bytes,
    named,
    owing_mean_over,
    view_code,
)  # fmt: skip

__all__ = [
    "Codecs", "GroupError", "HookState", "Mean", "ReduceScatter", "Work", "all_gather_mean", "all_reduce",
    "background", "chunk_numel", "chunk_of", "code_bytes", "ddp_hook", "over_group", "simulate",
]  # fmt: skip


# --- means of tensors -----------------------------------------------------------------------------------------


class Work:
    """A collective that is under way."""

    def __init__(self, future: Any, finish: Callable[[], None]) -> None:
        self._future, self._finish = future, finish

    def wait(self) -> None:
        """Returns when the result is in place; raises what went wrong."""
        self._future.result()
        finish, self._finish = self._finish, lambda: None
        finish()

    def is_completed(self) -> bool:
        return bool(self._future.done())


class _Lane:
    """A thread, and tags or a process group of its own, so that what runs there meets no collective of others."""

    def __init__(self, group: dist.ProcessGroup | None, number: int) -> None:
        self.of = self.group = chosen = named(group)
        self.number = number
        if dist.get_backend(chosen) == "nccl":  # no tags: what one group does has one order
            timeout = chosen._get_backend(torch.device("cuda")).options._timeout
            members = dist.get_process_group_ranks(chosen)
            self.group = dist.new_group(members, timeout, "nccl", use_local_synchronization=True)
        self.pool = ThreadPoolExecutor(1, "tq-collectives")

    def submit(self, call: Callable[[], Any]) -> Any:
        return self.pool.submit(call)


_lanes: dict[str, list[_Lane]] = {}
_lanes_lock = threading.Lock()
_DIRECT, _BEHIND = 0, 1  # lanes of what runs in the caller's thread and of what was started with async_op


def _lane(group: dist.ProcessGroup | None, own: bool = False) -> _Lane:
    """The lane of asynchronous calls, or a new one; all ranks make theirs in the same order."""
    chosen = named(group)
    alive = set(dist.distributed_c10d._world.pg_map)
    with _lanes_lock:
        for name, lanes in list(_lanes.items()):
            if lanes[0].of not in alive:  # the group was destroyed
                for lane in _lanes.pop(name):
                    lane.pool.shutdown(wait=False)
        lanes = _lanes.setdefault(chosen.group_name, [_Lane(group, _BEHIND)])
        if own:
            lanes.append(_Lane(group, _BEHIND + len(lanes)))
        return lanes[-1] if own else lanes[0]


def _flat(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Flat tensors, one for each dtype, and what writes them back where they are copies."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return [tensors[0].detach().view(-1)], lambda: None
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault(x.dtype, []).append(x)
    flats = [torch.cat([x.detach().reshape(-1) for x in kind]) for kind in kinds.values()]

    def write() -> None:
        for kind, flat in zip(kinds.values(), flats, strict=True):
            for x, part in zip(kind, flat.split([x.numel() for x in kind]), strict=True):
                x.detach().copy_(part.view(x.shape))

    return flats, write


def _checked(x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    tensors = [x] if isinstance(x, Tensor) else list(x)
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            said = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"x must be dense tensors of float32, bfloat16 or float16, got {said}")
        if torch._C._overlaps(tensor, tensor) and 0 in tensor.stride() and tensor.numel() > 1:
            raise ValueError(f"x must have memory for each element, got strides {tensor.stride()}: it is expanded")
    return [tensor for tensor in tensors if tensor.numel()]


def all_reduce(
    x: Tensor | Sequence[Tensor], codec: Codec | Codecs, group: dist.ProcessGroup | None = None,
    async_op: bool = False, step: int = 0,
) -> Work | None:  # fmt: skip
    """x becomes the mean over the ranks, in place; with bytes of ``codec`` on the wire, identical on all ranks.

    Arguments:
        x: tensors of fp32, bf16 or fp16, the same on every rank; a list is sent as one tensor for each dtype.
        codec: of both legs, or of each.
        async_op: returns a ``Work`` at once; it must be waited for before x is used. Collectives that are started
            like this run one after another, in the order of their start, which must be the same on all ranks.
        step: with another step come other seeds, so that errors do not repeat.

    Raises GroupError, on every rank, if the ranks ask for different things or one is gone; FloatingPointError, on every
    rank, where a rank's x is not finite and the codec has nonfinite="raise".
    """
    tensors, codecs = _checked(x), _pair(codec)
    if not tensors and dist.get_backend(named(group)) == "nccl":
        return Work(_Done(), lambda: None) if async_op else None
    flats, write = _flat(tensors)
    asked = [(flat, (step, number)) for number, flat in enumerate(flats)]
    if async_op:
        lane = _lane(group)
        return Work(lane.submit(lambda: mean_over(asked, codecs, lane.group, lane=lane.number)), write)
    mean_over(asked, codecs, group)
    write()
    return None


class _Done:
    def result(self) -> None:
        return None

    def done(self) -> bool:
        return True


def _pair(codec: Codec | Codecs) -> Codecs:
    first, second = (codec, codec) if isinstance(codec, Codec) else codec
    if first.block != second.block:
        raise ValueError(f"the codecs of the two legs must have one block, got {first.block} and {second.block}")
    return first, second


def all_gather_mean(x: Tensor, codec: Codec, group: dist.ProcessGroup | None = None, step: int = 0) -> None:
    """The mean as the whitepaper's report forms it: everybody's code to everybody, (n - 1) codes a rank. In place.

    Between hosts (gloo) the codes go round a ring, whose receives are asked for first: the backend's own all-gather
    lets the two directions of a link take turns, which is not the method's fault.
    """
    tensors = _checked(x)
    if not tensors:
        return
    (flat,), write = _flat(tensors)
    ranks, rank, blocks = dist.get_world_size(group), dist.get_rank(group), -(-flat.numel() // codec.block)
    codecs = [replace(codec, nonfinite="propagate").derive(step, 1, r) for r in range(ranks)]
    messages = torch.empty(ranks, message_bytes(codec, blocks), dtype=torch.uint8, device=flat.device)
    codes = [
        view_code(chosen, message, blocks, flat.numel(), torch.float32)
        for chosen, message in zip(codecs, messages, strict=True)
    ]
    mine = view_code(codecs[rank], messages[rank], blocks, flat.numel(), flat.dtype)
    with guarded(group):
        agree(f"{codec} for a gathering of {flat.numel()} x {flat.dtype}, step {step}", flat.device, group)
        if flat.is_cuda:
            codecs[rank].encode(flat, mine)
            all_gather(messages.view(-1), messages[rank].clone(), group=group)
        else:
            before, after, last = (rank - 1) % ranks, (rank + 1) % ranks, ranks - 1
            tag = first_tag(_DIRECT)  # messages between two ranks arrive in their order
            received: list[Any] = [
                dist.irecv(messages[(before - k) % ranks], group=group, group_src=before, tag=tag) for k in range(last)
            ]
            codecs[rank].encode(flat, mine)
            sent: list[Any] = []
            for k in range(last):
                sent.append(dist.isend(messages[(rank - k) % ranks], group=group, group_dst=after, tag=tag))
                received[k].wait()
            for work in sent:
                work.wait()
    total = torch.zeros(flat.shape, device=flat.device)
    for chosen, code in zip(codecs, codes, strict=True):
        chosen.decode(code, out=total, accumulate=True)
    flat.copy_(total.div_(ranks))
    write()


# --- DDP ------------------------------------------------------------------------------------------------------


class HookState:
    """What ``ddp_hook`` keeps: the codecs, the step, which the seeds come from, and a group of its own.

    Made by all ranks of the group together, after ``init_process_group``. The step counts what was synchronised, so
    that a job that goes on from a checkpoint, with ``load_state_dict``, sees the seeds that it would have seen.
    What is not finite propagates, whatever the codec says: DDP's users look at gradients, or a scaler does.
    """

    def __init__(self, codec: Codec | Codecs, group: dist.ProcessGroup | None = None) -> None:
        first, second = _pair(codec)
        self.codecs = replace(first, nonfinite="propagate"), replace(second, nonfinite="propagate")
        self.lane = _lane(group, own=True)
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if set(state) != {"step"} or not isinstance(state["step"], int):
            raise ValueError(f"not a state of HookState: it has the keys {sorted(state)}, expected ['step']")
        self.step = state["step"]


def ddp_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """For ``DistributedDataParallel.register_comm_hook``: a bucket's mean, while the backward pass goes on."""
    buffer, key = bucket.buffer(), (state.step, bucket.index())
    if bucket.is_last():
        state.step += 1
    if buffer.is_cuda:
        return _on_stream(state, buffer, key)
    future: torch.futures.Future[Tensor] = torch.futures.Future()

    def run() -> None:
        try:
            mean_over([(buffer, key)], state.codecs, state.lane.group, lane=state.lane.number)
            future.set_result(buffer)
        except Exception as error:  # DDP raises it where it waits
            future.set_exception(error)  # type: ignore[arg-type]

    state.lane.submit(run)
    return future


_streams: dict[torch.device, Any] = {}


def _on_stream(state: HookState, buffer: Tensor, key: Key) -> torch.futures.Future[Tensor]:
    """On a GPU nothing waits on the host, so a stream of its own is enough."""
    stream = _streams.setdefault(buffer.device, torch.cuda.Stream(buffer.device))
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        mean_over([(buffer, key)], state.codecs, state.lane.group)
        buffer.record_stream(stream)
        future.set_result(buffer)
    return future


# --- FSDP2 ----------------------------------------------------------------------------------------------------


class ReduceScatter:
    """For FSDP2's ``set_custom_reduce_scatter``: gradients travel as codes, the sum is in fp32. One for each module or
    one for all; ``state_dict`` holds the number of calls, which the seeds come from. What is not finite propagates."""

    def __init__(self, codec: Codec) -> None:
        self.codec = replace(codec, nonfinite="propagate")
        self.step = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"op must be SUM or AVG, got {op}")
        ranks, rank, numel = dist.get_world_size(group), dist.get_rank(group), output_tensor.numel()
        blocks = -(-numel // self.codec.block)
        codecs = [self.codec.derive(self.step, 1, r) for r in range(ranks)]
        self.step += 1
        sent = torch.empty(ranks, message_bytes(self.codec, blocks), dtype=torch.uint8, device=input_tensor.device)
        with guarded(group):
            agree(f"{self.codec} for a reduce-scatter of {numel}, step {self.step - 1}", input_tensor.device, group)
            for chunk, message in zip(input_tensor.view(ranks, numel), sent, strict=True):
                codecs[rank].encode(chunk, view_code(codecs[rank], message, blocks, numel, chunk.dtype))
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=group)
        total = torch.zeros(numel, device=input_tensor.device)
        for codec, message in zip(codecs, received, strict=True):
            codec.decode(view_code(codec, message, blocks, numel, torch.float32), out=total, accumulate=True)
        output_tensor.view(-1).copy_(total.div_(ranks) if op == dist.ReduceOp.AVG else total)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


# --- what optimizers ask for ----------------------------------------------------------------------------------


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
    key: Key = ()
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


def _codes(asked: Mean, rank: int) -> Code:
    """The first leg's code of the whole tensor."""
    assert asked.codecs is not None
    codec = asked.codecs[0].derive(*asked.key, 1, rank)
    code = codec.empty(tuple(asked.x.shape), asked.x.dtype, asked.x.device)
    owed = encode_owing(codec, asked.x, code, None if asked.errors is None else asked.errors[0])
    if asked.errors is not None and owed is not None:
        asked.errors = owed, asked.errors[1]
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
    codes = [_codes(request, rank) for rank, request in enumerate(asked)]
    second = codecs[1].derive(*asked[0].key, 2)
    for rank, request in enumerate(asked):
        first, end = chunk_of(numel, second.block, rank, ranks)
        if end > first:
            parts = [_part(code, numel, first, end) for code in codes]
            code = second.empty(parts[0].shape, torch.float32, request.x.device)
            owed = encode_mean(parts, code, None if request.errors is None else request.errors[1])
            if request.errors is not None and owed is not None:
                request.errors = request.errors[0], owed
            mean, start = second.decode(code), first * second.block
            for receiver in asked:
                receiver.x[start : start + mean.numel()] = mean


def over_group(asked: Mean, group: dist.ProcessGroup | None = None) -> None:
    """Answers the request of this rank with the other ranks of a process group, who must ask for the same."""
    if asked.codecs is None:
        with guarded(group):
            agree(f"a mean of {asked.x.numel()} in fp32", asked.x.device, group)
            dist.all_reduce(asked.x, group=group)
        asked.x.div_(dist.get_world_size(group))
    else:
        _by_codes(asked, group, _DIRECT)


def _by_codes(asked: Mean, group: dist.ProcessGroup | None, lane: int) -> None:
    assert asked.codecs is not None
    if asked.errors is None:
        mean_over([(asked.x, asked.key)], asked.codecs, group, lane=lane)
    else:
        asked.errors = owing_mean_over(asked.x, asked.codecs, asked.key, asked.errors, group, lane)


def background(asked: Mean, group: dist.ProcessGroup | None = None) -> Work:
    """``over_group`` while other work goes on; nothing of the request may be touched before the wait."""
    lane = _lane(group)

    def answer() -> None:
        if asked.codecs is not None:
            _by_codes(asked, lane.group, lane.number)
        elif asked.x.is_cuda:
            over_group(asked, lane.group)
        else:
            exact_mean_over(asked.x, lane.group, lane.number)

    return Work(lane.submit(answer), lambda: None)

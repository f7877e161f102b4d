"""Means over ranks, exact or compressed: of tensors, of DDP's and FSDP2's gradients, and of what an optimizer asks for.

The compressed all-reduce has two phases. In the reduce-scatter every rank encodes its tensor and sends each other rank
that rank's chunk; in the all-gather the chunks, decoded and averaged in fp32, are encoded again and sent to all, who
decode the same bytes. The first seed is the rank's own, so that the errors of the ranks are independent; the second is
shared. Bytes per rank and phase: (n - 1)/n of the encoded tensor; of a ring all-reduce, (n - 1)/n of 4 per element.
An optimizer requests a ``Mean`` and receives an ``Averaged``. So the same optimizer runs on a rank of a process group,
alone, or as one of several workers simulated in a process, where only the wire is missing."""

# no postponed annotations: DDP looks at those of its hooks
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import DTYPES, Code, Codec
from tq.train.comm.agreement import Attempt, GroupError, Request, check_consistent, guarded
from tq.train.comm.channels import (
    BEHIND,
    Channel,
    channel_of,
    new_channel,
    resolve_group,
)
from tq.train.comm.layout import (
    Codecs,
    Key,
    chunk_numel,
    chunk_of,
    code_bytes,
    message_bytes,
    new_messages,
    seeded,
    view_code,
)  # fmt: skip
from tq.train.comm.pipeline import Residuals, encode_mean, encode_residual, exact_mean_over, mean_over, pass_round

__all__ = [
    "Averaged", "Codecs", "GroupError", "HookState", "Mean", "ReduceScatter", "Residuals", "Work", "all_gather_mean",
    "all_reduce", "background", "chunk_numel", "chunk_of", "code_bytes", "ddp_hook", "mean_in_process", "over_group",
]  # fmt: skip

T = TypeVar("T")
WARMUP = 50  # first steps of a training with exact means, the shipped default


class Work(Generic[T]):
    """A collective under way, as ``all_reduce(async_op=True)`` returns it.

    Args:
        future: has ``result()`` and ``done()``.
        finish: maps that result to what ``wait`` returns; called once.
    Example:
        >>> import torch, torch.distributed as dist, tq.train.collectives
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> work = tq.train.collectives.all_reduce(torch.ones(1000), tq.Codec(bits=4), async_op=True)
        >>> work.wait()
        >>> dist.destroy_process_group()
    """

    def __init__(self, future: Any, finish: Callable[[Any], T]) -> None:
        self._future, self._finish, self._found = future, finish, list[T]()

    def wait(self) -> T:
        """Block until the result is in place and return it; raises what went wrong."""
        found = self._future.result()
        if not self._found:
            self._found.append(self._finish(found))
        return self._found[0]

    def is_completed(self) -> bool:
        """Whether the collective has ended, so that ``wait`` does not block."""
        return bool(self._future.done())

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
        if tensor.numel() and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"x must have memory for each element, got strides {tensor.stride()}: it is expanded")
    return [tensor for tensor in tensors if tensor.numel()]


def all_reduce(
    x: Tensor | Sequence[Tensor], codec: Codec | Codecs, group: dist.ProcessGroup | None = None,
    async_op: bool = False, step: int = 0,
) -> Work[None] | None:  # fmt: skip
    """Average x over the ranks in place, quantized on the wire; the result is identical on all ranks.

    Args:
        x: tensor or list of tensors, fp32, bf16 or fp16, of equal shapes on all ranks. A list travels as one per dtype.
        codec: of both phases, or a pair with one block size.
        group: process group; None is the default group.
        async_op: return at once; wait before x is used. Such calls run in the order of their start, alike on all ranks.
        step: selects the seeds; pass another one each time, so that errors do not repeat.
    Returns:
        None, or a ``Work`` with async_op=True.
    Raises:
        GroupError: on every rank if requests differ or a rank is gone; if one fails by its own error, on the others.
        FloatingPointError: on every rank if x of one is not finite and nonfinite="raise". Any error leaves x undefined.
        TypeError, ValueError: x is of another dtype, sparse or expanded, or block sizes differ.
    Example:
        >>> import torch, torch.distributed as dist, tq.train.collectives
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> gradient = torch.ones(1000)
        >>> tq.train.collectives.all_reduce(gradient, tq.Codec(bits=4), step=1)
        >>> round(gradient.mean().item(), 1)
        1.0
        >>> dist.destroy_process_group()
    """
    tensors, codecs = _checked(x), _pair(codec)
    if not tensors and dist.get_backend(resolve_group(group)) == "nccl":
        return Work(_Done(), lambda _: None) if async_op else None
    flats, write = _flat(tensors)
    asked = [(flat, (step, number)) for number, flat in enumerate(flats)]
    if async_op:
        channel = channel_of(group, BEHIND)
        return Work(channel.submit(lambda: mean_over(asked, codecs, channel=channel)), lambda _: write())
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
        raise ValueError(f"the codecs of the two phases must have one block, got {first.block} and {second.block}")
    return first, second


def all_gather_mean(x: Tensor, codec: Codec, group: dist.ProcessGroup | None = None, step: int = 0) -> None:
    """The mean as the whitepaper's report forms it, in place: each rank's code to all others, (n - 1) codes each. On
    gloo by a ring, receives first: in its own all-gather a link's directions take turns, not the method's fault."""
    tensors = _checked(x)
    if not tensors:
        return
    (flat,), write = _flat(tensors)
    ranks, rank, blocks = dist.get_world_size(group), dist.get_rank(group), -(-flat.numel() // codec.block)
    codecs = [seeded(replace(codec, nonfinite="propagate"), (step,), 1, r) for r in range(ranks)]
    messages = new_messages(ranks, message_bytes(codec, blocks), flat.device)
    codes = [
        view_code(chosen, message, blocks, flat.numel(), torch.float32)
        for chosen, message in zip(codecs, messages, strict=True)
    ]
    mine = view_code(codecs[rank], messages[rank], blocks, flat.numel(), flat.dtype)
    channel = channel_of(group)
    def decode() -> None:
        total = torch.zeros(flat.shape, device=flat.device)
        for chosen, code in zip(codecs, codes, strict=True):
            chosen.decode(code, out=total, accumulate=True)
        flat.copy_(total.div_(ranks))
    asked = Request("a gathering", (codec,), ((flat.numel(), flat.dtype),), ((step,),))
    with Attempt(channel) as attempt:
        check_consistent(asked, flat.device, channel)
        pass_round(messages, channel, partial(attempt.make, partial(codecs[rank].encode, flat, mine), messages[rank]))
        attempt.look(messages)
        attempt.make(decode)
    write()



class HookState:
    """State of ``ddp_hook``: the codecs, a channel of its own, and ``step``, which selects the seeds.

    ``step`` counts synchronised backward passes; ``state_dict`` holds it, so that a resumed job sees the seeds that it
    would have seen. NaN and Inf propagate whatever the codec says: users of DDP, or a GradScaler, check the gradients.

    Args:
        codec: of both phases, or a pair with one block size.
        group: process group, all of whose ranks make it together; None is the default group.
        warmup: first steps with exact means; 50 as in ``TurboQuantAdamW``, where the reason stands.
    Raises:
        ValueError: ``warmup`` is no integer >= 0, or block sizes differ. RuntimeError: there is no process group.
    Example:
        >>> import torch.distributed as dist, tq.train.collectives
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> tq.train.collectives.HookState(tq.Codec(bits=4), warmup=50).state_dict()
        {'step': 0}
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, codec: Codec | Codecs, group: dist.ProcessGroup | None = None, warmup: int = WARMUP
    ) -> None:
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise ValueError(f"warmup must be an integer >= 0, got {warmup!r}")
        first, second = _pair(codec)
        self.codecs = replace(first, nonfinite="propagate"), replace(second, nonfinite="propagate")
        self.warmup = warmup
        self.channel = new_channel(group)
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """The step alone."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from ``state``; ValueError for one of something else."""
        self.step = _step_of(state, "HookState")

def _step_of(state: dict[str, int], what: str) -> int:
    if set(state) != {"step"} or not isinstance(state["step"], int):
        raise ValueError(f"not a state of {what}: it must have an int as 'step' and nothing else, got {state!r:.200}")
    return state["step"]


def ddp_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Hook for ``DistributedDataParallel.register_comm_hook``: quantized means, while the backward pass goes on.

    Args:
        state: ``HookState`` of this model.
        bucket: gradients, given by DDP; its buffer takes the mean.
    Returns:
        torch.futures.Future: of the buffer, or of the error, which DDP raises.
    Example:
        >>> import torch, torch.distributed as dist, tq
        >>> from tq.train.collectives import HookState, ddp_hook
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> model.register_comm_hook(HookState(tq.Codec(bits=4), warmup=0), ddp_hook)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> dist.destroy_process_group()
    """
    buffer, key = bucket.buffer(), (state.step, bucket.index())
    if bucket.is_last():
        state.step += 1
    if buffer.is_cuda:
        return _on_stream(state, buffer, key)
    future: torch.futures.Future[Tensor] = torch.futures.Future()

    def run() -> None:
        try:
            _mean_of(state, buffer, key)
            future.set_result(buffer)
        except Exception as error:  # DDP raises it where it waits
            future.set_exception(error)  # type: ignore[arg-type]
    state.channel.submit(run)
    return future

def _mean_of(state: HookState, buffer: Tensor, key: Key) -> None:
    if key[0] >= state.warmup:
        mean_over([(buffer, key)], state.codecs, channel=state.channel)
    else:
        buffer.copy_(over_group([Mean(buffer.float())], channel=state.channel)[0].mean)

def _on_stream(state: HookState, buffer: Tensor, key: Key) -> torch.futures.Future[Tensor]:
    """On a GPU the host waits only where ranks are compared, so a stream of its own is enough."""
    stream = state.channel.stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        _mean_of(state, buffer, key)
        buffer.record_stream(stream)
        future.set_result(buffer)
    return future



class ReduceScatter:
    """Quantized reduce-scatter for FSDP2's ``set_custom_reduce_scatter``, summed in fp32: one per module or for all.

    Args:
        codec: of what is sent; NaN and Inf propagate. ``state_dict`` holds the number of calls, which gives the seeds.
    Raises:
        ValueError: when called with an ``op`` other than SUM or AVG. GroupError: as in ``all_reduce``.
    Example:
        >>> import torch, torch.distributed as dist, tq.train.collectives
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = fully_shard(torch.nn.Linear(64, 64))
        >>> model.set_custom_reduce_scatter(tq.train.collectives.ReduceScatter(tq.Codec(bits=4)))
        >>> dist.destroy_process_group()
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = replace(codec, nonfinite="propagate")
        self.step = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory for FSDP: this ``size``, ``dtype`` and ``device``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"op must be SUM or AVG, got {op}")
        ranks, rank, numel = dist.get_world_size(group), dist.get_rank(group), output_tensor.numel()
        blocks = -(-numel // self.codec.block)
        codecs, device = [seeded(self.codec, (self.step,), 1, r) for r in range(ranks)], input_tensor.device
        asked = Request("a reduce-scatter", (self.codec,), ((numel, input_tensor.dtype),), ((self.step,),))
        self.step += 1
        sent = new_messages(ranks, message_bytes(self.codec, blocks), device)
        received, channel = torch.empty_like(sent), channel_of(group)
        def encode() -> None:
            for chunk, message in zip(input_tensor.view(ranks, numel), sent, strict=True):
                codecs[rank].encode(chunk, view_code(codecs[rank], message, blocks, numel, chunk.dtype))
        def decode() -> None:
            total = torch.zeros(numel, device=device)
            for codec, message in zip(codecs, received, strict=True):
                codec.decode(view_code(codec, message, blocks, numel, torch.float32), out=total, accumulate=True)
            output_tensor.view(-1).copy_(total.div_(ranks) if op == dist.ReduceOp.AVG else total)
        with Attempt(channel) as attempt:
            check_consistent(asked, device, channel)
            attempt.make(encode, sent)
            with guarded(channel):
                dist.all_to_all_single(received, sent, group=group)
            attempt.look(received)
            attempt.make(decode)

    def state_dict(self) -> dict[str, int]:
        """The number of calls."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from ``state``; ValueError for one of something else."""
        self.step = _step_of(state, "ReduceScatter")



@dataclass(frozen=True)
class Mean:
    """Request for the mean of ``x``, a flat fp32 tensor, over all ranks.

    Attributes:
        x: given away, its memory takes the mean. codecs: of the two phases; None sends fp32.
        key: names the seeds, with the phase and the rank: (step, number of the bucket, ...).
        residuals: error feedback of the two phases, added before encoding; as long as x, and as this rank's chunk.
        nbytes: bytes that a rank sends, where it is not the usual algorithm that carries x (a sparse tensor, say).
    """

    x: Tensor
    codecs: Codecs | None = None
    key: Key = (0,)
    residuals: Residuals | None = None
    nbytes: float | None = field(default=None, kw_only=True)

    def sent_bytes(self, ranks: int) -> float:
        """Bytes that each of so many ranks sends (mean over the ranks)."""
        if self.nbytes is not None:
            return self.nbytes
        share = (ranks - 1) / ranks
        if self.codecs is None:
            return 2 * share * 4 * self.x.numel()
        return sum(share * code_bytes(codec, self.x.numel()) for codec in self.codecs)

class Averaged(NamedTuple):
    """The answer: the mean, and the residuals now (None without feedback)."""

    mean: Tensor
    residuals: Residuals | None

def _encode_whole(asked: Mean, codec: Codec) -> tuple[Code, Tensor | None]:
    """The first phase's code of the whole tensor, and its residual."""
    code = codec.empty(tuple(asked.x.shape), asked.x.dtype, asked.x.device)
    return code, encode_residual(codec, asked.x, code, None if asked.residuals is None else asked.residuals[0])

def _part(code: Code, numel: int, first: int, end: int) -> Code:
    """Blocks first ... end - 1 of the code of a flat tensor."""
    block = code.codec.block
    length = min(end * block, numel) - min(first * block, numel)
    return Code(code.codec, (length,), code.dtype, code.payload[first:end], code.scales[first:end])

def mean_in_process(asked: Sequence[Mean]) -> list[Averaged]:
    """Answers one request of each rank of a simulated group, given in the order of the ranks."""
    ranks, numel, codecs = len(asked), asked[0].x.numel(), asked[0].codecs
    if codecs is None:
        mean = torch.stack([request.x for request in asked]).mean(0) if ranks > 1 else asked[0].x
        return [Averaged(request.x.copy_(mean), request.residuals) for request in asked]
    coded = [_encode_whole(each, seeded(codecs[0], each.key, 1, rank)) for rank, each in enumerate(asked)]
    second = seeded(codecs[1], asked[0].key, 2)
    answers = []
    for rank, (request, (_, lost)) in enumerate(zip(asked, coded, strict=True)):
        first, end = chunk_of(numel, second.block, rank, ranks)
        residual = None if request.residuals is None else request.residuals[1]
        if end > first:
            parts = [_part(code, numel, first, end) for code, _ in coded]
            code = second.empty(parts[0].shape, torch.float32, request.x.device)
            start, stop = first * second.block, min(end * second.block, numel)
            mean = request.x[start:stop]  # was coded, and takes the mean: the sum may lie there before
            residual = encode_mean(parts, code, residual, total=mean)
            second.decode(code, out=mean)
            for receiver in asked:
                if receiver is not request:
                    receiver.x[start:stop] = mean
        answers.append(Averaged(request.x, None if lost is None or residual is None else (lost, residual)))
    return answers

def over_group(
    asked: Sequence[Mean], group: dist.ProcessGroup | None = None, channel: Channel | None = None
) -> list[Averaged]:
    """Answers requests of this rank with the ranks of a process group, whose requests are the same. Neighbours of equal
    codecs share a pipeline: one travels while the next is encoded. channel: None is that of the caller's thread."""
    answers: list[Averaged] = []
    channel = channel or channel_of(group)
    for codecs, neighbours in groupby(asked, lambda request: request.codecs):
        requests = list(neighbours)
        if codecs is None:
            for request in requests:
                answers.append(_exactly(request, channel))
            continue
        tensors, before = [(request.x, request.key) for request in requests], [r.residuals for r in requests]
        after = mean_over(tensors, codecs, residuals=before, channel=channel)
        answers += [Averaged(request.x, residuals) for request, residuals in zip(requests, after, strict=True)]
    return answers

def _exactly(asked: Mean, channel: Channel) -> Averaged:
    x = asked.x
    check_consistent(Request("a mean in fp32", tensors=((x.numel(), x.dtype),)), x.device, channel)
    with guarded(channel):
        dist.all_reduce(x, group=channel.group)
    return Averaged(x.div_(dist.get_world_size(channel.group)), asked.residuals)

def background(asked: Mean, group: dist.ProcessGroup | None = None) -> Work[Averaged]:
    """``over_group`` of one request while other work goes on: ``wait`` gives the answer."""
    channel = channel_of(group, BEHIND)
    def answer() -> Averaged:
        if asked.codecs is not None:
            return over_group([asked], channel=channel)[0]
        if asked.x.is_cuda:
            return _exactly(asked, channel)
        exact_mean_over(asked.x, channel)
        return Averaged(asked.x, asked.residuals)
    return Work(channel.submit(answer), lambda found: found)

"""``ddp_hook``'s state and FSDP2's reduce-scatter, made before there is a process group, as launchers want them.

The exact first steps of both share no messages with what DDP and FSDP2 send by themselves."""

# no postponed annotations: DDP looks at those of its hooks
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Codec
from tq.train import collectives
from tq.train.collectives import WARMUP, Codecs
from tq.train.comm.agreement import Request, check_consistent, guarded
from tq.train.comm.channels import Channel, channel_of, new_channel
from tq.train.comm.pipeline import exact_mean_over
from tq.train.comm.plain import scatter_sums
from tq.train.comm.whole import fits, mean_of_whole, scatter_whole

__all__ = ["HookState", "ReduceScatter", "ddp_hook"]


def _checked(warmup: int) -> int:
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"warmup must be an integer >= 0, got {warmup!r}")
    return warmup


class HookState(collectives.HookState):
    """State of ``ddp_hook``: the codecs, and ``step``, which counts synchronised backward passes and selects the seeds.

    It can be made, and pickled to workers, before there is a process group: what carries its messages is made by the
    first gradients, on all ranks alike. ``state_dict`` holds the step, so that a resumed job sees the seeds that it
    would have seen. NaN and Inf propagate whatever the codec says: users of DDP, or a GradScaler, check the gradients.

    Args:
        codec: of both phases, or a pair with one block size.
        group: process group; None is the default group at the first gradients, and can be pickled.
        warmup: first steps with exact means; 50 as in ``TurboQuantAdamW``, where the reason stands.
    Raises:
        ValueError: ``warmup`` is no integer >= 0, or block sizes differ.
    Example:
        >>> from tq import Codec
        >>> from tq.train.hooks import HookState
        >>> HookState(Codec(bits=4), warmup=50).state_dict()
        {'step': 0}
    """

    def __init__(self, codec: Codec | Codecs, group: dist.ProcessGroup | None = None, warmup: int = WARMUP) -> None:
        self.warmup, self.step = _checked(warmup), 0
        first, second = collectives._pair(codec)
        self.codecs = replace(first, nonfinite="propagate"), replace(second, nonfinite="propagate")
        self._group = group
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:  # type: ignore[override]
        """Its own; RuntimeError where there is no process group."""
        self._channel = self._channel or new_channel(self._group)
        return self._channel

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_channel": None}  # a group cannot be pickled, and says so


def ddp_hook(state: collectives.HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Hook for ``DistributedDataParallel.register_comm_hook``: quantized means, while the backward pass goes on.

    The exact first steps on CPUs have messages of their own too. As sums of the group, in the hook's thread, they would
    meet what DDP sums by itself, as with ``find_unused_parameters=True``, in another order on another rank. On GPUs a
    bucket goes whole, and the host waits only where ranks are compared: in the first quantized step, and in every 64th
    call. There each bucket costs the host about a millisecond, so take large ones (``bucket_cap_mb=100``).

    Args:
        state: of this model.
        bucket: gradients, given by DDP; its buffer takes the mean.
    Returns:
        torch.futures.Future: of the buffer, or of the error, which DDP raises.
    Example:
        >>> import torch, torch.distributed as dist, tq
        >>> from tq.train.hooks import HookState, ddp_hook
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> model.register_comm_hook(HookState(tq.Codec(bits=4)), ddp_hook)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> dist.destroy_process_group()
    """
    buffer, channel = bucket.buffer(), state.channel
    if buffer.is_cuda and state.step >= state.warmup and fits(state.codecs, buffer.device):
        return _whole_on_stream(state, bucket)
    if buffer.is_cuda or state.step >= state.warmup:
        return collectives.ddp_hook(state, bucket)
    state.step += bucket.is_last()
    future: torch.futures.Future[Tensor] = torch.futures.Future()

    def run() -> None:
        try:
            mean = buffer.float()
            exact_mean_over(mean, channel)
            future.set_result(buffer.copy_(mean))
        except Exception as error:  # DDP raises it where it waits
            future.set_exception(error)  # type: ignore[arg-type]

    channel.submit(run)
    return future


def _whole_on_stream(state: collectives.HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The host waits only where ranks are compared, so a stream of its own is enough."""
    buffer, key, stream = bucket.buffer(), (state.step, bucket.index()), state.channel.stream(bucket.buffer().device)
    state.step += bucket.is_last()
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        mean_of_whole(buffer, key, state.codecs, state.channel)
        buffer.record_stream(stream)
        future.set_result(buffer)
    return future


class ReduceScatter(collectives.ReduceScatter):
    """Quantized reduce-scatter for FSDP2's ``set_custom_reduce_scatter``, summed in fp32: one per module or for all.

    Args:
        codec: of what is sent; NaN and Inf propagate. ``state_dict`` holds the number of calls, which gives the seeds.
        warmup: first calls without it. A backward pass is one call for each module that shares it.
    Raises:
        ValueError: ``warmup`` is no integer >= 0; when called, ``op`` is neither SUM nor AVG. GroupError: as in
            ``tq.train.collectives.all_reduce``.
    Example:
        >>> import torch, torch.distributed as dist, tq
        >>> from torch.distributed.fsdp import fully_shard
        >>> from tq.train.hooks import ReduceScatter
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = fully_shard(torch.nn.Linear(64, 64))
        >>> model.set_custom_reduce_scatter(ReduceScatter(tq.Codec(bits=4), warmup=50))
        >>> dist.destroy_process_group()
    """

    def __init__(self, codec: Codec, warmup: int = WARMUP) -> None:
        self.warmup = _checked(warmup)
        super().__init__(codec)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if known and self.step >= self.warmup and self._whole(output_tensor, input_tensor):
            step, self.step = self.step, self.step + 1
            averaged = op == dist.ReduceOp.AVG
            return scatter_whole(output_tensor.view(-1), input_tensor, step, self.codec, channel_of(group), averaged)
        if self.step >= self.warmup or not known:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        key, x, channel = (self.step,), input_tensor, channel_of(group)
        self.step += 1
        asked = Request("a reduce-scatter without codes", tensors=((x.numel(), x.dtype),), keys=(key,))
        check_consistent(asked, x.device, channel)
        with guarded(channel):
            scatter_sums(output_tensor, x, op, group)

    def _whole(self, out: Tensor, x: Tensor) -> bool:
        """Whether it can go in few launches."""
        return x.is_cuda and out.is_contiguous() and x.is_contiguous() and fits((self.codec, self.codec), x.device)

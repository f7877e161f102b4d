"""``tq.train.hooks`` for GPUs: each bucket or shard goes whole, in few launches and calls.

Where ``tq.train.hooks`` cuts a bucket into pieces, which fills a slow link early, this sends it at once, so that the
host keeps ahead of the card. Ranks end with the same bits; all of them must use the same of the two. Tensors of the
host, exact first steps and codecs without kernels go the way of ``tq.train.hooks``.
"""

# no postponed annotations: DDP looks at those of its hooks
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.train import hooks
from tq.train.comm.channels import channel_of
from tq.train.comm.whole import fits, mean_of_whole, scatter_whole
from tq.train.hooks import HookState

__all__ = ["HookState", "ReduceScatter", "ddp_hook"]


def ddp_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Hook for ``DistributedDataParallel.register_comm_hook``: quantized means, while the backward pass goes on.

    The host waits only where ranks are compared: in the first step, and in every 64th call. Larger buckets
    (``bucket_cap_mb``) cost it less.

    Args:
        state: of this model.
        bucket: gradients, given by DDP; its buffer takes the mean.
    Returns:
        torch.futures.Future: of the buffer.
    Raises:
        GroupError: as ``tq.train.hooks.ddp_hook`` tells by its future.
    Example:
        >>> import torch, torch.distributed as dist, tq
        >>> from tq.train.gpu_hooks import HookState, ddp_hook
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> model.register_comm_hook(HookState(tq.Codec(bits=4)), ddp_hook)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> dist.destroy_process_group()
    """
    buffer = bucket.buffer()
    if not buffer.is_cuda or state.step < state.warmup or not fits(state.codecs, buffer.device):
        return hooks.ddp_hook(state, bucket)
    key, channel = (state.step, bucket.index()), state.channel
    state.step += bucket.is_last()
    stream = channel.stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        mean_of_whole(buffer, key, state.codecs, channel)
        buffer.record_stream(stream)
        future.set_result(buffer)
    return future


class ReduceScatter(hooks.ReduceScatter):
    """Quantized reduce-scatter for FSDP2's ``set_custom_reduce_scatter``, summed in fp32: one per module or for all.

    Args:
        codec: of what is sent; NaN and Inf propagate. ``state_dict`` holds the number of calls, which gives the seeds.
        warmup: first calls without it. A backward pass is one call for each module that shares it.
    Raises:
        ValueError, GroupError: as ``tq.train.hooks.ReduceScatter``.
    Example:
        >>> import torch, torch.distributed as dist, tq
        >>> from torch.distributed.fsdp import fully_shard
        >>> from tq.train.gpu_hooks import ReduceScatter
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = fully_shard(torch.nn.Linear(64, 64))
        >>> model.set_custom_reduce_scatter(ReduceScatter(tq.Codec(bits=4), warmup=50))
        >>> dist.destroy_process_group()
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        summed = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and self.step >= self.warmup
        if not summed or not self._whole(output_tensor, input_tensor):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        step, self.step = self.step, self.step + 1
        averaged = op == dist.ReduceOp.AVG
        scatter_whole(output_tensor.view(-1), input_tensor, step, self.codec, channel_of(group), averaged)

    def _whole(self, out: Tensor, x: Tensor) -> bool:
        """Whether it can go in few launches."""
        return x.is_cuda and out.is_contiguous() and x.is_contiguous() and fits((self.codec, self.codec), x.device)

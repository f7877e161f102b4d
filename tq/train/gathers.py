"""FSDP2's weight all-gather in a few bits: every rank, the owner too, computes with the decoded weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Codec
from tq.train import wire


class AllGather:
    """Quantized all-gather for FSDP2's ``set_custom_all_gather``, one per module.

    The master weights stay whole on their owner; what all compute with is decoded from one code, the same on all ranks.

    Args:
        codec: of what is sent.
        step: the number of the training step, shared with the job: part of every seed.
        fresh: whether the seed changes with the step, or stays the same for all steps.
    """

    def __init__(self, codec: Codec, step: list[int], fresh: bool = True) -> None:
        self.codec, self.step, self.fresh = codec, step, fresh

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory for FSDP: this ``size``, ``dtype`` and ``device``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        ranks, rank, numel = dist.get_world_size(group), dist.get_rank(group), input_tensor.numel()
        # both passes of a step gather the same weights: the same key, the same code
        key = (self.step[0] if self.fresh else 0, numel)
        message = wire.pack(input_tensor, self.codec, (*key, rank))
        messages = message.new_empty(ranks * message.numel())
        dist.all_gather_into_tensor(messages, message, group=group)
        parts = zip(output_tensor.view(ranks, numel), messages.view(ranks, -1), strict=True)
        for owner, (part, each) in enumerate(parts):
            wire.unpack(each, part, self.codec, (*key, owner))
        return None

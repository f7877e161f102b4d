"""Tensor parallelism of the book's GPT on PyTorch's DTensor, with its activations in a few bits where that is asked.

Column-parallel projections up, row-parallel ones down: one all-reduce of [tokens, hidden] a projection that writes into
the residual stream, forward, and one backward where the input is used. With sequence parallelism each is a
reduce-scatter and an all-gather of the same bytes.

Source: Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tq.quant.codec import Codec
from tq.train.collectives import all_reduce


class _Summed(torch.autograd.Function):
    """The sum of all ranks' parts, quantized on the wire; each rank's gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Codec, group: dist.ProcessGroup, step: int) -> Tensor:
        total = x.detach().clone()
        all_reduce(total, codec, group, step=step)
        return total.mul_(dist.get_world_size(group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None, None


class _Copied(torch.autograd.Function):
    """Passes the input as it is; the gradient is the sum of all ranks', quantized on the wire."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Codec, group: dist.ProcessGroup, step: int) -> Tensor:
        ctx.given = codec, group, step
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        codec, group, step = ctx.given
        total = gradients[0].detach().clone()
        all_reduce(total, codec, group, step=step)
        return total.mul_(dist.get_world_size(group)), None, None, None


class Calls:
    """Numbers the coded all-reduces of a step, alike on all ranks: (step, call) gives the seed."""

    def __init__(self, step: list[int]) -> None:
        self.step, self.seen, self.number = step, step[0], 0

    def next(self) -> int:
        if self.step[0] != self.seen:
            self.seen, self.number = self.step[0], 0
        self.number += 1
        return (self.seen << 20) + self.number


class CodedRow(RowwiseParallel):
    """``RowwiseParallel`` whose sum travels in a few bits; every rank decodes the same."""

    def __init__(self, codec: Codec, calls: Calls) -> None:
        super().__init__(output_layouts=Replicate(), use_local_output=True)
        self.codec, self.calls = codec, calls

    def _prepare_output_fn(  # type: ignore[override]
        self, output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        part = outputs.to_local(grad_placements=[Replicate()])
        summed: Tensor = _Summed.apply(part, self.codec, device_mesh.get_group(), self.calls.next())
        return summed


class CodedInput(ParallelStyle):
    """What column-parallel projections read: as it is forward, its gradients summed in a few bits backward."""

    def __init__(self, codec: Codec, calls: Calls) -> None:
        super().__init__()
        self.codec, self.calls = codec, calls

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def read(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = _Copied.apply(inputs[0], self.codec, group, self.calls.next())
            # the parts of its gradient are summed above, not by DTensor
            return (DTensor.from_local(x, device_mesh, [Replicate()], grad_placements=[Partial()]), *inputs[1:])

        module.register_forward_pre_hook(read)
        return module


def block_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """How a block of the GPT is split: the plan of ``parallelize_module``."""
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    for name in ("attention.out", "mlp.down"):
        plan[name] = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    # the input becomes a DTensor once: each projection by itself would send a gradient of its own back
    inside: Any = Shard(1) if sequence else Replicate()
    plan |= {
        "attention": PrepareModuleInput(
            input_layouts=(inside, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(inside,), desired_input_layouts=(Replicate(),)),
    }
    if sequence:
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    return plan


def split(
    chunk: nn.Module, mesh: DeviceMesh, *, sequence: bool, loss_parallel: bool,
    codec: Codec | None = None, step: list[int] | None = None,
) -> None:  # fmt: skip
    """Splits a chunk of the GPT over a one-dimensional mesh, in place.

    Args:
        chunk: with ``blocks``, and ``embed``, ``final_norm``, ``head`` where it has them.
        mesh: of the tensor-parallel ranks.
        sequence: whether activations between the split parts are split over the sequence.
        loss_parallel: whether logits stay split over the vocabulary; the loss is then taken under ``loss_parallel()``.
        codec: of the all-reduces of the blocks; None sends fp32. Not with ``sequence``.
        step: counts the training steps; part of every seed.
    """
    if codec is not None and sequence:
        raise ValueError("a codec goes on the all-reduces of tensor parallelism, not with sequence parallelism")
    calls = Calls(step if step is not None else [0])
    for block in chunk.blocks.values():  # type: ignore[operator]
        plan = block_plan(sequence)
        if not isinstance(getattr(block.mlp, "up", None), nn.Linear):  # experts stay whole
            plan = {name: style for name, style in plan.items() if not name.startswith("mlp")}
        elif getattr(block.mlp, "gate", None) is not None:
            plan["mlp.gate"] = ColwiseParallel()
        if codec is not None:
            plan |= {name: CodedRow(codec, calls) for name in ("attention.out", "mlp.down") if name in plan}
            plan |= {name: CodedInput(codec, calls) for name in ("attention", "mlp") if f"{name}.down" in plan
                     or name == "attention"}  # fmt: skip
        parallelize_module(block, mesh, plan)
    edges: dict[str, ParallelStyle] = {}
    whole = Shard(1) if sequence else Replicate()
    if getattr(chunk, "embed", None) is not None:
        edges["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=whole)
    if getattr(chunk, "head", None) is not None:
        if sequence:
            edges["final_norm"] = SequenceParallel()
        last = Shard(-1) if loss_parallel else Replicate()
        edges["head"] = ColwiseParallel(
            input_layouts=whole, output_layouts=last, use_local_output=not loss_parallel
        )
    if edges:
        parallelize_module(chunk, mesh, edges)

"""Pipelines on ``torch.distributed.pipelining``: its schedules by name, orders of one's own, and edges in a few bits.

    stage = CodedStage(module, index, stages, group, forward=tq.Codec(bits=4), backward=None, step=[0])
    run = schedule("1f1b", [stage], micro_batches, loss)
    run.step(x); run.step(target=y, losses=[])

An order is what ``tq.systems.schedules`` makes: for each rank its (kind, stage, micro-batch), one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from tq.quant.codec import Codec
from tq.train import _pipelining, wire

#: PyTorch's class of each name, and how it places stages: one a rank, round and round, or there and back.
SCHEDULES: dict[str, tuple[str, str]] = {
    "gpipe": ("ScheduleGPipe", "line"),
    "1f1b": ("Schedule1F1B", "line"),
    "interleaved": ("ScheduleInterleaved1F1B", "loop"),
    "looped-bfs": ("ScheduleLoopedBFS", "loop"),
    "zb1p": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}


def placement(name: str, ranks: int, chunks: int) -> list[list[int]]:
    """Stages of every rank under a schedule; ``chunks`` stages a rank, which "v" schedules want to be 2."""
    kind = SCHEDULES[name][1] if name in SCHEDULES else ("line" if chunks == 1 else "v")
    wanted = {"line": 1, "v": 2}.get(kind, chunks)
    if chunks != wanted:
        raise ValueError(f"{name} holds {wanted} stages per rank, got chunks={chunks}")
    if kind == "v":
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [[rank + chunk * ranks for chunk in range(chunks)] for rank in range(ranks)]


def schedule(
    name: str, stages: list[Any], micro_batches: int, loss: Callable[..., Tensor],
    order: Sequence[Sequence[tuple[str, int, int]]] | None = None,
) -> Any:  # fmt: skip
    """PyTorch's schedule of this name, or its runtime on an order of one's own where one is given."""
    if order is not None:
        return _pipelining.runtime(stages, micro_batches, loss, order)
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)} or have an order, got {name!r}")
    kind, placed = SCHEDULES[name]
    given = stages[0] if placed == "line" else stages
    return getattr(torch_schedules, kind)(given, micro_batches, loss_fn=loss)


def order_of(run: Any) -> list[list[tuple[str, int, int]]]:
    """The order that a schedule of PyTorch with several stages a rank will run."""
    return _pipelining.from_actions(run.pipeline_order)


def overlapped_of(run: Any) -> list[tuple[str, int, int]]:
    """Passes of such a schedule whose result is sent only when the next pass of the list is over, too."""
    return _pipelining.overlapped(run.pipeline_order)


class CodedStage(PipelineStage):
    """A stage whose edges carry codes: activations forward, their gradients backward; each opt-in.

    Args:
        forward, backward: codec of the activations sent, and of the gradients; None sends fp32.
        step: shared by all stages of a rank; ``step[0]`` is in every seed and counts up once a training step.
    """

    def __init__(
        self, module: nn.Module, index: int, stages: int, group: dist.ProcessGroup, *, forward: Codec | None,
        backward: Codec | None, step: list[int],
    ) -> None:  # fmt: skip
        super().__init__(module, index, stages, torch.device("cpu"), group=group)
        self.codecs, self.step = (forward, backward), step
        self.messages: dict[tuple[int, int], list[Tensor]] = {}

    def _key(self, way: int, edge: int, micro: int, number: int) -> tuple[int, ...]:
        return (self.step[0], way, edge, micro, number)

    def _pack(self, ops: list[dist.P2POp], way: int, edge: int, micro: int) -> list[dist.P2POp]:
        codec = self.codecs[way]
        if codec is not None:
            for number, op in enumerate(ops):
                op.tensor = wire.pack(op.tensor, codec, self._key(way, edge, micro, number))
        return ops

    def _expect(self, ops: list[dist.P2POp], way: int, micro: int) -> list[dist.P2POp]:
        codec = self.codecs[way]
        if codec is not None:
            found = self.messages[way, micro] = []
            for op in ops:
                op.tensor = torch.empty(wire.nbytes(codec, op.tensor.numel()), dtype=torch.uint8)
                found.append(op.tensor)
        return ops

    def _open(self, infos: Sequence[Any], way: int, edge: int, micro: int) -> None:
        codec, messages = self.codecs[way], self.messages.pop((way, micro), [])
        if codec is not None and messages:  # an edge inside a rank has none
            for number, (info, message) in enumerate(zip(infos, messages, strict=True)):
                with torch.no_grad():
                    wire.unpack(message, info.buffer.detach(), codec, self._key(way, edge, micro, number))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._pack(super().get_fwd_send_ops(fwd_chunk_id), 0, self.stage_index, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._pack(super().get_bwd_send_ops(bwd_chunk_id), 1, self.stage_index - 1, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._expect(super().get_fwd_recv_ops(fwd_chunk_id), 0, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._expect(super().get_bwd_recv_ops(bwd_chunk_id), 1, bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._open(self.args_recv_info[fwd_chunk_id], 0, self.stage_index - 1, fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._open(self.grad_recv_info[bwd_chunk_id], 1, self.stage_index, bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

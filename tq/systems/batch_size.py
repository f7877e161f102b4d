"""How many sequences fit a GPU: memory is affine in the micro-batch, so two evaluations of `tq.systems.memory` say all.

    footprint(model, layout).largest(0.92 * gpu("h100-80gb").memory_bytes)

What does not grow with the batch (weights, gradients, states, a gathered layer) is `fixed_bytes`; the rest is
`sequence_bytes` a sequence. Not here: how fast a batch is, nor whether a larger one still learns as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Unpack

from tq.systems.arguments import positive
from tq.systems.layout import Compression, Layout
from tq.systems.memory import Software, memory
from tq.systems.shape import Transformer


@dataclass(frozen=True)
class Footprint:
    """Bytes of a GPU: fixed_bytes + micro_batch * sequence_bytes."""

    fixed_bytes: float
    sequence_bytes: float

    def sequences(self, gpu_bytes: float) -> float:
        """The largest micro-batch as a real number; 0 where not even the fixed part fits."""
        positive("gpu_bytes", gpu_bytes)
        return max(0.0, (gpu_bytes - self.fixed_bytes) / self.sequence_bytes)

    def largest(self, gpu_bytes: float) -> int:
        """The largest micro-batch; 0 where none fits."""
        return math.floor(self.sequences(gpu_bytes))


def _footprint(
    model: Transformer, layout: Layout, stage: str, compression: Compression | None, software: Software
) -> Footprint:
    def total(micro_batch: int) -> float:
        batch = layout.micro_batches * layout.dp * micro_batch
        held = replace(layout, micro_batch=micro_batch, global_batch=batch)
        return memory(model, held, compression=compression, stage=stage, **software).total

    one, two = total(1), total(2)
    return Footprint(2 * one - two, two - one)


def footprint(
    model: Transformer, layout: Layout, gpu_bytes: float, *, compression: Compression | None = None,
    **software: Unpack[Software],
) -> Footprint:  # fmt: skip
    """Of the pipeline stage that is full first on a GPU of so many bytes. The layout's number of micro-batches stays,
    their size is ignored. software: as in ``memory``, but attention is fused unless flash=False."""
    given: Software = {"flash": True, **software}
    stages = ("first", "last") if layout.pp > 1 else ("first",)
    found = [_footprint(model, layout, stage, compression, given) for stage in stages]
    return min(found, key=lambda each: each.sequences(gpu_bytes))


def gain(coded_share: float, ratio: float) -> float:
    """How many times more sequences fit when a share of a sequence's bytes shrinks by a ratio: 1 / (1 - c + c / r)."""
    positive("coded_share", coded_share, zero=True, most=1.0)
    positive("ratio", ratio, finite=True)
    return 1 / (1 - coded_share + coded_share / ratio)


def share_for(wanted: float, ratio: float) -> float:
    """The share that a wanted gain needs, (1 - 1 / m) / (1 - 1 / r); above 1 where no share is enough."""
    positive("wanted", wanted)
    if not ratio > 1:
        raise ValueError(f"ratio must be above 1, got {ratio}")
    return (1 - 1 / wanted) / (1 - 1 / ratio)

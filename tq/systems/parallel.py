"""Which layouts a cluster can run a model in, and which of them `tq.systems.iteration` predicts to be fastest.

    layout, prediction = best(Transformer.preset("llama2-70b"), Cluster("h100-80gb", 1024), global_batch=1024)

Only stages of equal length, micro-batches in powers of two, tensor parallelism within a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np

from tq.systems.arguments import instance, positive, positive_int
from tq.systems.efficiency import Efficiency, software_facts
from tq.systems.hardware import Cluster
from tq.systems.iteration import PARTS, Prediction, predict
from tq.systems.layout import RECOMPUTE, Bits, Compression, Layout
from tq.systems.memory import memory
from tq.systems.shape import Transformer

__all__ = ["PARTS", "Bits", "Choice", "Compression", "Layout", "Prediction", "best", "layouts", "predict"]

USABLE = 0.92  # of the memory; the rest is for the CUDA context, buffers, fragmentation: an assumption


class Choice(NamedTuple):
    """A layout and what is predicted for it."""

    layout: Layout
    prediction: Prediction


def _divisors(value: int, most: int | None = None) -> list[int]:
    return [d for d in range(1, min(value, most or value) + 1) if value % d == 0]


def layouts(
    model: Transformer, cluster: Cluster, global_batch: int, *, software: str = "megatron-core",
    compression: Compression | None = None, recompute: Sequence[str] = RECOMPUTE, zero: Sequence[int] = (0, 1, 2, 3),
    cp: int = 1, usable: float | None = USABLE,
) -> Iterator[Layout]:  # fmt: skip
    """Yields every valid layout of a model on a cluster whose memory fits.

    Args:
        model: shape of the model; expert parallelism is tried if it has experts.
        cluster: the GPUs; tensor parallelism, with and without sequence parallelism, stays within a node.
        global_batch: sequences per step.
        software: a software generation of ``data/software.csv``; "megatron-core" by default.
        compression: what is quantized; None (default) means nothing.
        recompute: modes to try among "none", "selective" (unless attention is fused), "full"; all by default.
        zero: ZeRO stages to try among 0, 1, 2, 3; all by default.
        cp: context-parallel ranks; 1 by default.
        usable: share of a GPU's memory that a layout may take, 0.92 by default; None yields all.
    Raises:
        TypeError, ValueError: if an argument has the wrong type or an unknown value.
    Example:
        >>> from tq.systems import Cluster, Transformer, layouts
        >>> len(list(layouts(Transformer.preset("gpt2-1.5b"), Cluster("a100-80gb", 8), 64, zero=(1,))))
        164
    """
    instance("model", model, Transformer)
    instance("cluster", cluster, Cluster)
    positive_int("global_batch", global_batch)
    positive_int("cp", cp)
    if isinstance(recompute, str) or not recompute or not set(recompute) <= set(RECOMPUTE):
        raise ValueError(f"recompute must list one or more of {', '.join(RECOMPUTE)}; got {recompute!r}")
    if not zero or not set(zero) <= {0, 1, 2, 3}:
        raise ValueError(f"zero must list one or more of 0, 1, 2, 3; got {zero!r}")
    if usable is not None:
        positive("usable", usable, most=1.0)
    facts = software_facts(software)
    limit = float("inf") if usable is None else usable * cluster.spec.memory_bytes
    # a fused attention keeps no scores, so there is nothing selective to recompute
    modes = [mode for mode in recompute if not (facts.flash and mode == "selective")]
    for tp in _divisors(cluster.node_gpus):
        if cluster.gpus % (tp * cp) or model.heads % tp or model.width % tp or model.seq % cp:
            continue
        for pp in _divisors(cluster.gpus // (tp * cp), model.layers):
            dp = cluster.gpus // (tp * pp * cp)
            if model.layers % pp or global_batch % dp:
                continue
            each = global_batch // dp
            experts = 1 if model.moe is None else model.moe.count
            for ep in (d for d in _divisors(experts) if (dp * cp) % d == 0):
                for stage in zero if dp * cp > 1 else zero[:1]:
                    for micro in (2**k for k in range(each.bit_length()) if each % 2**k == 0):
                        chunks = _divisors(model.layers // pp) if pp > 1 and (each // micro) % pp == 0 else [1]
                        for parallel in (False, True) if tp > 1 else (False,):
                            for mode in modes:
                                for v in chunks:
                                    found = Layout(
                                        tp, pp, dp, micro, global_batch, mode, parallel, v, stage, cp=cp, ep=ep
                                    )
                                    held = memory(model, found, compression=compression, **facts.memory)
                                    if held.total <= limit:
                                        yield found


def best(
    model: Transformer, cluster: Cluster, global_batch: int, software: str = "megatron-core",
    compression: Compression | None = None, *, efficiency: Efficiency | None = None, cp: int = 1,
    usable: float | None = USABLE,
) -> Choice:  # fmt: skip
    """Finds the layout whose step is predicted to be the shortest among those that fit.

    Args:
        model: shape of the model.
        cluster: the GPUs and their network.
        global_batch: sequences per step.
        software: a software generation of ``data/software.csv``; "megatron-core" by default.
        compression: what is quantized; None (default) means nothing.
        efficiency: shares of the hardware's rates that are reached; None (default) means the fitted ones.
        cp: context-parallel ranks; 1 by default.
        usable: share of a GPU's memory that a layout may take, 0.92 by default; None means any.

    Returns:
        The pair (layout, prediction), as ``Choice``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if no layout fits, or an input is an array of samples, each of which has a best layout of its own.

    Example:
        >>> from tq.systems import Cluster, Transformer, best
        >>> layout, prediction = best(Transformer.preset("gpt2-1.5b"), Cluster("a100-80gb", 8), global_batch=64)
        >>> layout.tp, layout.dp, layout.zero
        (1, 8, 1)
    """
    instance("cluster", cluster, Cluster)
    instance("efficiency", efficiency, Efficiency, none=True)
    for given in (cluster, compression, efficiency):
        for field in fields(given) if given is not None else ():
            if np.ndim(getattr(given, field.name)):
                raise ValueError(f"{field.name} must be a number to search for the best layout, got an array")
    fastest: Choice | None = None
    for layout in layouts(
        model, cluster, global_batch, software=software, compression=compression, cp=cp, usable=usable
    ):
        found = predict(model, layout, cluster, software, compression, efficiency=efficiency)
        if fastest is None or found.iteration_s < fastest.prediction.iteration_s:
            fastest = Choice(layout, found)
    if fastest is None:
        raise ValueError(
            f"no layout of the {model.parameters / 1e9:.3g}B model fits {cluster.gpus} x {cluster.gpu} "
            f"with global_batch={global_batch}; accepted is a batch that divides over them, or more GPUs"
        )
    return fastest

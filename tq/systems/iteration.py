"""Time of a training iteration by part, from shape, layout and cluster, on a network of two levels.

A layer's own time is that of `tq.systems.layer`: thin products, as tensor parallelism and short micro-batches make
them, run at the memory's pace. Full recomputation repeats the forward pass; software that stops with the last tensor
that is needed (PyTorch's checkpointing without reentry since 2.1, XLA) spares the last product and what follows it. A
pipeline runs at the pace of its fullest stage and loses (p - 1) / v micro-batches to the bubble. Data-parallel traffic
hides behind the backward pass of the last micro-batch as far as the software overlaps and that pass is long enough;
ZeRO-3's, which is there in every micro-batch, behind both passes, and what hides still costs a share of its time. Not
modelled: sharding within a node and replication between nodes (HSDP), stragglers, input pipelines, checkpoints,
congestion. For mixtures of experts it is a lower bound: experts are evenly loaded and their products as fast as dense
ones.

Sources: Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti et al. 2022 (arXiv:2205.05198), Rajbhandari et al. 2020
(arXiv:1910.02054), and `tq.systems.collectives` for the collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tq.systems.arguments import Real, instance
from tq.systems.efficiency import Efficiency, Facts, software_facts
from tq.systems.efficiency import efficiency as fitted
from tq.systems.hardware import GIB, NVLINK_LATENCY_S, Cluster
from tq.systems.layer import FLASH_BACKWARD, FP16, Rates, forward, gemm_s
from tq.systems.layout import Compression, Layout
from tq.systems.memory import Memory, activation_bytes, memory, stage_parameters
from tq.systems.pipeline import bubble_s
from tq.systems.shape import Transformer

#: Bytes a logit: cast to fp32, maximum, difference, exponential, sum, quotient; gradient, cast back. None is fused.
LOSS_BYTES = 6.0 + 4.0 + 8.0 + 8.0 + 4.0 + 8.0 + 8.0 + 6.0
OPTIMIZER_BYTES = 38.0  # a parameter: gradient norm, zeroing, AdamW on fp32 state, the 16-bit copy
#: Parts that add up to iteration_s. "dp_total" is besides: what the data-parallel traffic takes, hidden or not.
PARTS = (
    "gemm", "attention", "elementwise", "recompute", "tp", "cp", "ep", "pp", "bubble", "dp_exposed", "optimizer",
    "codec",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of one training step. Times and rates are arrays where inputs of ``predict`` were.

    Attributes:
        iteration_s: seconds per step; for mixtures of experts a lower bound.
        model_tflops_per_gpu: TFLOP/s per GPU, counting what the model needs.
        hardware_tflops_per_gpu: TFLOP/s per GPU, counting recomputation too.
        memory_gib: GiB on the GPU that holds most.
        parts: seconds per step by part. The parts of ``tq.systems.iteration.PARTS`` add up to ``iteration_s``;
            "dp_total" is all data-parallel traffic, overlapped or not.
        interval: 80 % interval (low, high) of ``iteration_s``, from the errors on published runs of dense models
            that the model was not fitted to; it does not apply to mixtures of experts.
        memory: bytes by part on the GPU that holds most.
        tokens_per_iteration: tokens per step.

    Example:
        >>> from tq.systems import Cluster, Layout, Transformer, predict
        >>> model = Transformer.preset("gpt2-1.5b")
        >>> found = predict(model, Layout(dp=8, global_batch=64, zero=1), Cluster("a100-80gb", 8))
        >>> found.tokens_per_iteration, max(found.parts, key=found.parts.get)
        (65536, 'gemm')
        >>> bool(found.interval[0] < found.iteration_s < found.interval[1])
        True
    """

    iteration_s: Real
    model_tflops_per_gpu: Real
    hardware_tflops_per_gpu: Real
    memory_gib: float
    parts: dict[str, Real]
    interval: tuple[Real, Real]
    memory: Memory
    tokens_per_iteration: int

    @property
    def tokens_per_s(self) -> Real:
        """Tokens per second of the whole cluster."""
        return self.tokens_per_iteration / self.iteration_s


def _all_reduce_s(rates: Rates, cluster: Cluster, ranks: int, local: int, rs: float, ag: float) -> Real:
    """A reduce-scatter of rs bytes and an all-gather of ag bytes over ranks, local of which share a node: a ring within
    the node on NVLink, and one between nodes on which each GPU carries its share."""
    if ranks == 1:
        return 0.0
    local = max(1, min(local, ranks))
    nodes = -(-ranks // local)
    total = rs + ag
    time: Real = 0.0
    if local > 1:
        time = (local - 1) / local * total / rates.intra + 2 * (local - 1) * NVLINK_LATENCY_S
    if nodes > 1:
        rounds = 2 * np.ceil(np.log2(nodes))
        time = time + (nodes - 1) / nodes * total / local / rates.inter + rounds * cluster.latency_s
    return time


@dataclass(frozen=True)
class Setting:
    """One iteration to predict: what runs, on what, with which constants. The functions below take it."""

    model: Transformer
    layout: Layout
    cluster: Cluster
    facts: Facts
    efficiency: Efficiency
    compression: Compression | None = None

    @cached_property
    def rates(self) -> Rates:
        e, cluster = self.efficiency, self.cluster
        return Rates(
            cluster.peak_flops * e.gemm, cluster.hbm_bytes_per_s * e.hbm, cluster.intra_bytes_per_s * e.intra,
            cluster.inter_bytes_per_s * e.inter,
        )  # fmt: skip

    @property
    def tokens(self) -> float:
        """Of a micro-batch on one GPU."""
        return self.layout.micro_batch * self.model.seq / self.layout.cp

    @property
    def hidden_bytes(self) -> float:
        """The 16-bit hidden states of a micro-batch."""
        return FP16 * self.tokens * self.model.hidden

    @property
    def passes(self) -> int:
        """Through a layer in a step, forward and backward, and forward again where all is recomputed."""
        return 3 if self.layout.recompute == "full" else 2

    @property
    def ranks(self) -> int:
        """That hold the same weights."""
        return self.layout.dp * self.layout.cp

    @cached_property
    def parameters(self) -> tuple[float, float]:
        """Of the stage with the embedding, on one GPU: (all but routed experts, routed experts)."""
        return stage_parameters(self.model, self.layout, "first")


class LayerTime(NamedTuple):
    """Seconds of a mean layer and micro-batch. gemm, attention, rest: of the forward pass; attention_back: of the
    backward one; the others of all passes. gathering: gradients are added up in place."""

    gemm: Real
    attention: Real
    attention_back: Real
    rest: Real
    gathering: Real
    recompute: Real
    tp: Real
    cp: Real
    ep: Real

    @property
    def forward(self) -> Real:
        return self.gemm + self.attention + self.rest

    @property
    def backward(self) -> Real:
        """With what is computed again for it."""
        return 2 * (self.gemm + self.rest) + self.attention_back + self.gathering + self.recompute

    @property
    def total(self) -> Real:
        return self.forward + self.backward + self.tp + self.cp + self.ep


class DataParallel(NamedTuple):
    """Seconds of a step: what data-parallel traffic takes, and what of it nothing hides."""

    total: Real
    exposed: Real


def tensor_parallel_s(at: Setting) -> Real:
    """Of a layer and micro-batch: in each pass two all-reduces of the hidden states over the tensor-parallel ranks, or
    as many all-gathers and reduce-scatters; one where attention and MLP are parallel."""
    t = at.layout.tp
    if t == 1:
        return 0.0
    local = min(t, at.cluster.node_gpus)
    once = 2 * (local - 1) / local * at.hidden_bytes / at.rates.intra + 2 * np.log2(local) * NVLINK_LATENCY_S
    if t > local:  # between nodes each GPU carries its share through its own port
        nodes = t / local
        once = once + 2 * (nodes - 1) / nodes * at.hidden_bytes / local / at.rates.inter
        once = once + 2 * np.log2(nodes) * at.cluster.latency_s
    spared = at.facts.stops_early and at.layout.recompute == "full"  # what follows the last product is not repeated
    return (at.passes * at.model.norms - spared) * once * at.efficiency.communication


def context_parallel_s(at: Setting) -> Real:
    """Of a layer and micro-batch: keys and values go round all context-parallel ranks in each pass, and their gradients
    once more."""
    t, cp = at.layout.tp, at.layout.cp
    if cp == 1:
        return 0.0
    rate = at.rates.intra if t * cp <= at.cluster.node_gpus else at.rates.inter
    keys = FP16 * at.tokens * 2 * at.model.kv_width / t * (cp - 1)
    return (at.passes + 1) * keys / rate * at.efficiency.communication


def expert_parallel_s(at: Setting) -> Real:
    """Of a mean layer and micro-batch: in each pass tokens travel to their experts and back, an all-to-all each way."""
    model, layout, node = at.model, at.layout, at.cluster.node_gpus
    if layout.ep == 1 or model.moe is None:
        return 0.0
    inside = max(1, min(layout.ep, node // layout.tp))
    sent = FP16 * at.tokens * model.hidden * model.moe.active * model.moe_layers / model.layers / layout.tp
    off_node = 1 - inside / layout.ep
    return 2 * at.passes * sent * (off_node / at.rates.inter + (inside - 1) / layout.ep / at.rates.intra)


def pipeline_s(at: Setting) -> Real:
    """Of a micro-batch: hidden states to the next stage and their gradients back, once for each chunk of layers."""
    if at.layout.pp == 1:
        return 0.0
    return 2 * at.layout.interleave * at.hidden_bytes / at.layout.tp / at.rates.inter * at.efficiency.communication


def _zero3_exposed_s(total: Real, scatter: Real, ahead: Real, behind: Real, layers: int, cost: Real) -> Real:
    """What a step waits for of ZeRO-3's traffic: the weights are gathered for the forward pass behind that pass, and
    again for the backward pass with the gradients scattered behind that one; the first layer's gathering and the last
    one's scattering have nothing to hide behind. cost: what hides still takes this share of its time, as it occupies
    multiprocessors and memory."""
    gather = (total - scatter) / 2
    exposed = np.maximum(gather - ahead, 0.0) + np.maximum(gather + scatter - behind, 0.0)
    exposed = np.minimum(exposed + (gather + scatter) / layers, total)
    return exposed + cost * (total - exposed)


def _data_parallel_traffic_s(at: Setting) -> tuple[Real, Real]:
    """Of a step, on the stage with the embedding: (all data-parallel traffic, ZeRO-3's scattering of gradients)."""
    layout, m = at.layout, at.layout.micro_batches
    traffic = None if at.compression is None else at.compression.traffic
    sent_bytes = at.facts.gradient_bytes if traffic is None else traffic.bytes_per_element
    reduce_times, gather_times = (m, 2 * m) if layout.zero == 3 else (m if layout.zero == 2 else 1, 1)
    back_bytes = sent_bytes if layout.zero == 0 else FP16
    if at.compression is not None and at.compression.momentum and layout.zero:
        back_bytes = sent_bytes + FP16  # whole momenta return, and then the weights
    dense, routed = at.parameters
    local = max(1, at.cluster.node_gpus // layout.tp)
    total: Real = 0.0
    scatter: Real = 0.0
    for count, group, near in (
        (dense, at.ranks, local), (routed, at.ranks // layout.ep, max(1, local // layout.ep)),
    ):  # fmt: skip
        if count:
            sizes = (reduce_times * count * sent_bytes, gather_times * count * back_bytes)
            total = total + _all_reduce_s(at.rates, at.cluster, group, near, *sizes)
            if layout.zero == 3:
                scatter = scatter + _all_reduce_s(at.rates, at.cluster, group, near, sizes[0], 0.0)
    return total, scatter


def data_parallel_s(at: Setting, layer: LayerTime, head: Real) -> DataParallel:
    """Gradients reduced and, with ZeRO, weights gathered. Below ZeRO-3 they hide behind the backward pass of the last
    micro-batch as far as the software overlaps; ZeRO-3's, in every micro-batch, behind both passes. head: seconds of
    the output layer's product and the loss, all passes."""
    layout, m, e = at.layout, at.layout.micro_batches, at.efficiency
    layers = layout.stage_layers(at.model)
    total, scatter = _data_parallel_traffic_s(at)
    if at.ranks == 1:
        return DataParallel(total, 0.0)
    if layout.zero < 3:
        window = layer.total * layers / layout.interleave
        return DataParallel(total, total - np.minimum((1 - e.communication) * total, window))
    ahead = m * (layers * layer.forward + (head / 3 if layout.pp == 1 else 0.0))
    behind = m * (layers * layer.backward + (head * 2 / 3 if layout.pp == 1 else 0.0))
    slower = np.maximum(e.communication, 1.0)
    cost = 0.0 if at.facts.hidden_is_free else np.minimum(e.communication, 1.0)
    return DataParallel(total, _zero3_exposed_s(slower * total, slower * scatter, ahead, behind, m * layers, cost))


def layer_time(at: Setting) -> LayerTime:
    """A mean layer of the fullest stage on one micro-batch."""
    e, facts = at.efficiency, at.facts
    gemm, attention, rest, last = (each * e.compute for each in forward(at.model, at.layout, at.rates, facts.flash))
    # what recomputes everything may stop before the last product: nothing of the backward pass needs its result
    whole = gemm + attention + rest - (last if facts.stops_early else 0.0)
    again = {"none": 0.0, "selective": 0.0 if facts.flash else attention, "full": whole}
    # gradients are added up in place: read and written at their width, where a product writes 2 bytes
    layers = at.layout.stage_layers(at.model)
    gathering = (2 * facts.gradient_bytes - FP16) * sum(at.parameters) / layers / at.rates.hbm * e.compute
    return LayerTime(
        gemm, attention, attention * (FLASH_BACKWARD if facts.flash else 2.0), rest, gathering,
        again[at.layout.recompute], tensor_parallel_s(at), context_parallel_s(at), expert_parallel_s(at),
    )  # fmt: skip


def _head_s(at: Setting) -> Real:
    """The output layer's product and the loss on one micro-batch, all passes."""
    wide = at.model.vocab / at.layout.tp
    head = 3 * gemm_s(at.rates, at.tokens, float(at.model.hidden), wide) * at.efficiency.compute
    return head + at.tokens * at.model.vocab / at.layout.tp * LOSS_BYTES / at.rates.hbm * at.efficiency.compute


def _parts(at: Setting) -> dict[str, Real]:
    """Seconds of a step by part, and "dp_total"."""
    layout, layers = at.layout, at.layout.stage_layers(at.model)
    m, p = layout.micro_batches, layout.pp
    layer, head, pp = layer_time(at), _head_s(at), pipeline_s(at)
    dp = data_parallel_s(at, layer, head)
    numbers = sum(at.parameters)
    shard = numbers / at.ranks if layout.zero else numbers
    # the stage with the output layer may hold fewer layers; the slower kind sets the pace
    spare = 1 if layers * p > at.model.layers else 0
    last = head - spare * layer.total
    pace = np.maximum(last, 0.0) if p > 1 else head
    work = m * layers
    return {
        "gemm": work * 3 * layer.gemm + m * pace,
        "attention": work * (layer.attention + layer.attention_back),
        "elementwise": work * (3 * layer.rest + layer.gathering),
        "recompute": work * layer.recompute,
        "tp": work * layer.tp,
        "cp": work * layer.cp,
        "ep": work * layer.ep,
        "pp": m * pp,
        "bubble": bubble_s(p, layers * layer.total + pp / layout.interleave, layout.interleave),
        "dp_exposed": dp.exposed,
        "optimizer": shard * OPTIMIZER_BYTES / at.rates.hbm,
        "codec": _codec_s(at, numbers, shard),
        "dp_total": dp.total,
    }


def _check(
    model: Transformer, layout: Layout, cluster: Cluster, compression: Compression | None,
    efficiency: Efficiency | None,
) -> None:  # fmt: skip
    """ValueError or TypeError where the arguments of ``predict`` do not go together."""
    instance("model", model, Transformer)
    instance("layout", layout, Layout)
    instance("cluster", cluster, Cluster)
    instance("compression", compression, Compression, none=True)
    instance("efficiency", efficiency, Efficiency, none=True)
    layout.check(model)
    if compression is not None:
        compression.check(layout)
    if layout.gpus != cluster.gpus:
        raise ValueError(
            f"tp * pp * dp * cp must be the cluster's gpus={cluster.gpus}, "
            f"got {layout.tp} * {layout.pp} * {layout.dp} * {layout.cp} = {layout.gpus}"
        )


def predict(
    model: Transformer, layout: Layout, cluster: Cluster, software: str = "megatron-core",
    compression: Compression | None = None, *, efficiency: Efficiency | None = None,
) -> Prediction:  # fmt: skip
    """Predicts time and memory of one training step.

    The model follows Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti et al. 2022 (arXiv:2205.05198) and
    Rajbhandari et al. 2020 (arXiv:1910.02054). What it leaves out stands at the head of ``tq.systems.iteration``.

    Args:
        model: shape of the model.
        layout: how the run is split over GPUs.
        cluster: the GPUs and their network; ``cluster.gpus`` must equal ``layout.gpus``.
        software: a software generation of ``data/software.csv``; "megatron-core" by default.
        compression: what is quantized; None (default) means nothing.
        efficiency: shares of the hardware's rates that are reached; None (default) means those fitted to published
            runs (``data/efficiency.csv``). Its fields, the rates of the cluster and the codec's speed may be arrays
            of samples that broadcast together.

    Returns:
        A ``Prediction`` in seconds per step, TFLOP/s per GPU and GiB per GPU.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if model, layout, cluster and compression do not go together, or a name is unknown.

    Example:
        >>> from tq.systems import Bits, Cluster, Compression, Layout, Transformer, predict
        >>> model, cluster = Transformer.preset("llama2-7b"), Cluster("h100-80gb", 64, network="eth-10g")
        >>> layout = Layout(dp=64, global_batch=64)
        >>> plain = predict(model, layout, cluster)
        >>> quantized = predict(model, layout, cluster, compression=Compression(gradients=Bits(4)))
        >>> round(float(plain.iteration_s / quantized.iteration_s))  # times as fast on this slow network
        6
    """
    _check(model, layout, cluster, compression, efficiency)
    facts = software_facts(software)
    e = fitted(cluster.gpu, software) if efficiency is None else efficiency
    parts = _parts(Setting(model, layout, cluster, facts, e, compression))
    iteration = sum(parts[name] for name in PARTS)
    held = memory(model, layout, compression=compression, **facts.memory)
    per_gpu = iteration * cluster.gpus * 1e12
    return Prediction(
        iteration_s=iteration,
        model_tflops_per_gpu=model.model_flops(layout.global_batch) / per_gpu,
        hardware_tflops_per_gpu=model.hardware_flops(layout.global_batch, layout.recompute) / per_gpu,
        memory_gib=held.total / GIB,
        parts=parts,
        interval=(iteration * e.low, iteration * e.high),
        memory=held,
        tokens_per_iteration=layout.global_batch * model.seq,
    )


def _codec_s(at: Setting, numbers: float, shard: float) -> Real:
    """Encoding and decoding, none of it hidden. Bytes touched at a share of the memory bandwidth, or elements at the
    measured speed. numbers: parameters on a GPU; shard: those whose states it keeps."""
    model, layout, facts, compression = at.model, at.layout, at.facts, at.compression
    if compression is None:
        return 0.0
    touched, elements = 0.0, 0.0
    traffic = compression.traffic
    if traffic is not None and layout.dp * layout.cp > 1:
        wide, code = facts.gradient_bytes, traffic.bytes_per_element
        times = layout.micro_batches if layout.zero >= 2 else 1
        both = layout.zero == 0 or compression.momentum is not None
        # encode all, decode and add what the others sent of this rank's share; then once more for the way back
        touched += times * numbers * (wide + 2 * code) + (numbers * (wide + 2 * code) if both else 0.0)
        elements += times * 2 * numbers + (2 * numbers if both else 0.0)
    if compression.activations is not None:
        kept, _ = activation_bytes(model, layout, facts.flash, dtensor=facts.memory["dtensor"])
        count = kept / FP16 * layout.stage_layers(model) * layout.micro_batches
        touched += 2 * count * (FP16 + compression.activations.bytes_per_element)
        elements += 2 * count
    if compression.states is not None:
        touched += 4 * shard * (4.0 + compression.states.bytes_per_element)
        elements += 4 * shard
    if compression.elements_per_s is not None:
        return elements / compression.elements_per_s
    return touched / (at.cluster.hbm_bytes_per_s * compression.hbm_fraction)

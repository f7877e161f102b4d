"""Time of a training iteration by part, from shape, layout and cluster, on a network of two levels.

A GEMM takes the longer of flops / (peak * e_gemm) and bytes / (memory bandwidth * e_hbm): thin products, as tensor
parallelism and short micro-batches make them, run at the memory's pace. A pipeline runs at the pace of its fullest
stage and loses (p - 1) / v micro-batches to the bubble. Data-parallel traffic hides behind the backward pass of the
last micro-batch as far as the software overlaps and that pass is long enough; ZeRO-3's, which is there in every
micro-batch, behind both passes, and what hides still costs a share of its time. Not modelled: sharding within a node
and replication between nodes (HSDP), stragglers, input pipelines, checkpoints, congestion. For mixtures of experts it
is a lower bound: experts are evenly loaded and their products as fast as dense ones.

Sources: Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti et al. 2022 (arXiv:2205.05198), Rajbhandari et al. 2020
(arXiv:1910.02054), and `tq.systems.network` for the collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tq.systems.checks import Real, instance
from tq.systems.efficiency import Efficiency, Facts, software_facts
from tq.systems.efficiency import efficiency as fitted
from tq.systems.hardware import GIB, NVLINK_LATENCY_S, Cluster
from tq.systems.layout import Compression, Layout
from tq.systems.memory import Memory, activation_bytes, memory, stage_parameters
from tq.systems.model import Transformer

FP16 = 2.0
FLASH_SHARE = 0.6  # of a large GEMM's speed that fused attention reaches; an assumption
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
    """iteration_s; model_tflops_per_gpu counts what the model needs, hardware_tflops_per_gpu what is recomputed too;
    memory_gib of the fullest GPU. parts: seconds by part (``PARTS`` add up to iteration_s; "dp_total" is besides).
    interval: 80 % interval of iteration_s, from the errors that the model makes on published runs it was not fitted to.
    Arrays where the inputs were."""

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
        return self.tokens_per_iteration / self.iteration_s


class Rates(NamedTuple):
    """FLOP/s and bytes/s that are reached."""

    flops: Real
    hbm: Real
    intra: Real
    inter: Real


def _gemm_s(rates: Rates, m: float, k: float, n: float) -> Real:
    compute, traffic = 2.0 * m * k * n / rates.flops, FP16 * (m * k + k * n + m * n) / rates.hbm
    if isinstance(compute, float) and isinstance(traffic, float):  # np.maximum of two numbers is slow
        return max(compute, traffic)
    return np.maximum(compute, traffic)


def _layer_s(model: Transformer, layout: Layout, rates: Rates, flash: bool) -> tuple[Real, Real, Real]:
    """Forward pass of a mean layer on one micro-batch: (products with weights, attention, everything else)."""
    t, h = layout.tp, float(model.hidden)
    tokens = layout.micro_batch * model.seq / layout.cp
    gemm = _gemm_s(rates, tokens, h, (model.q_width + 2 * model.kv_width) / t)
    gemm = gemm + _gemm_s(rates, tokens, model.q_width / t, h)
    ups = 2 if model.gated else 1
    dense_layers = model.layers - model.moe_layers
    if dense_layers:
        mlp = _gemm_s(rates, tokens, h, ups * model.width / t) + _gemm_s(rates, tokens, model.width / t, h)
        gemm = gemm + mlp * (dense_layers / model.layers)
    visited = 1.0
    if model.moe is not None:
        width, local = model.expert_width / t, model.moe.count / layout.ep
        # tokens of all ep ranks meet here, spread evenly over this rank's experts
        each = tokens * model.moe.active / local
        routed = local * (_gemm_s(rates, each, h, ups * width) + _gemm_s(rates, each, width, h))
        if model.moe.shared:
            wide = model.moe.shared * width
            routed = routed + _gemm_s(rates, tokens, h, ups * wide) + _gemm_s(rates, tokens, wide, h)
        routed = routed + _gemm_s(rates, tokens, h, float(model.moe.count))
        gemm = gemm + routed * (model.moe_layers / model.layers)
        visited = (dense_layers + model.moe_layers * (model.moe.active + model.moe.shared)) / model.layers
    scores = model.score_flops * tokens / t
    if flash:  # causal: half of the scores are not computed
        attention = scores / 2 / (rates.flops * FLASH_SHARE)
        attention = attention + FP16 * tokens * 2 * (model.q_width + model.kv_width) / t / rates.hbm
    else:
        # scores written and read by the product, the softmax and the dropout: 2 bytes six times, a mask once
        attention = scores / rates.flops + tokens * model.seq * model.heads * 13.0 / t / rates.hbm
    outside = 8 * h + (14.0 if not model.gated else 12.0) * h  # two norms, two residual sums (with dropout)
    inside = (6.0 if model.gated else 4.0) * model.width * visited + 6.0 * (model.q_width + 2 * model.kv_width) / 3
    outside = outside / t if layout.sequence_parallel else outside
    if model.moe is not None:  # tokens are copied in the order of their experts and back, whole ones on every rank
        outside += FP16 * 2 * (model.moe.active + 1) * h * model.moe_layers / model.layers
    return gemm, attention, tokens * (outside + inside / t) / rates.hbm


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


def _zero3_exposed_s(total: Real, scatter: Real, ahead: Real, behind: Real, layers: int, cost: Real) -> Real:
    """What a step waits for of ZeRO-3's traffic: the weights are gathered for the forward pass behind that pass, and
    again for the backward pass with the gradients scattered behind that one; the first layer's gathering and the last
    one's scattering have nothing to hide behind. cost: what hides still takes this share of its time, as it occupies
    multiprocessors and memory."""
    gather = (total - scatter) / 2
    exposed = np.maximum(gather - ahead, 0.0) + np.maximum(gather + scatter - behind, 0.0)
    exposed = np.minimum(exposed + (gather + scatter) / layers, total)
    return exposed + cost * (total - exposed)


def predict(
    model: Transformer, layout: Layout, cluster: Cluster, software: str = "megatron-core",
    compression: Compression | None = None, *, efficiency: Efficiency | None = None,
) -> Prediction:  # fmt: skip
    """One iteration. software: a generation of `data/software.csv`. efficiency: None, the constants fitted to published
    runs (`data/efficiency.csv`); its fields, the rates of the cluster and the codec's speed may be arrays of samples
    that broadcast together. ValueError where model, layout and cluster do not go together."""
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
    facts = software_facts(software)
    e = fitted(cluster.gpu, software) if efficiency is None else efficiency
    rates = Rates(
        cluster.peak_flops * e.gemm, cluster.hbm_bytes_per_s * e.hbm, cluster.intra_bytes_per_s * e.intra,
        cluster.inter_bytes_per_s * e.inter,
    )  # fmt: skip
    m, t, p, v = layout.micro_batches, layout.tp, layout.pp, layout.interleave
    layers = layout.stage_layers(model)
    tokens = layout.micro_batch * model.seq / layout.cp
    node = cluster.node_gpus

    ranks = layout.dp * layout.cp
    dense, routed = stage_parameters(model, layout, "first")
    numbers = dense + routed
    gemm, attention, rest = (each * e.compute for each in _layer_s(model, layout, rates, facts.flash))
    again = {"none": 0.0, "selective": 0.0 if facts.flash else attention, "full": gemm + attention + rest}
    recompute = again[layout.recompute]
    head = 3 * _gemm_s(rates, tokens, float(model.hidden), model.vocab / t) * e.compute
    head = head + tokens * model.vocab / t * LOSS_BYTES / rates.hbm * e.compute

    # tensor parallelism: two all-reduces forward, two backward (or as many all-gathers and reduce-scatters)
    hidden_bytes = FP16 * tokens * model.hidden
    tp: Real = 0.0
    passes = 3 if layout.recompute == "full" else 2
    if t > 1:
        rate, latency = (rates.intra, NVLINK_LATENCY_S) if t <= node else (rates.inter, cluster.latency_s)
        tp = passes * 2 * (2 * (t - 1) / t * hidden_bytes / rate + 2 * np.log2(t) * latency) * e.communication
    cp: Real = 0.0
    if layout.cp > 1:
        rate = rates.intra if t * layout.cp <= node else rates.inter
        keys = FP16 * tokens * 2 * model.kv_width / t * (layout.cp - 1)
        cp = (passes + 1) * keys / rate * e.communication
    ep: Real = 0.0
    if layout.ep > 1 and model.moe is not None:
        inside = max(1, min(layout.ep, node // t))
        sent = FP16 * tokens * model.hidden * model.moe.active * model.moe_layers / model.layers / t
        off_node = 1 - inside / layout.ep
        ep = 2 * passes * sent * (off_node / rates.inter + (inside - 1) / layout.ep / rates.intra)
    # gradients are added up in place: read and written at their width, where a product writes 2 bytes
    gathering = (2 * facts.gradient_bytes - FP16) * numbers / layers / rates.hbm * e.compute
    layer = 3 * (gemm + attention + rest) + gathering + recompute + tp + cp + ep
    pp = 2 * v * hidden_bytes / t / rates.inter * e.communication if p > 1 else 0.0

    # data parallelism, on the stage with the embedding
    local = max(1, node // t)
    traffic = None if compression is None else compression.traffic
    sent_bytes = facts.gradient_bytes if traffic is None else traffic.bytes_per_element
    reduce_times, gather_times = (m, 2 * m) if layout.zero == 3 else (m if layout.zero == 2 else 1, 1)
    back_bytes = sent_bytes if layout.zero == 0 else FP16
    if compression is not None and compression.momentum and layout.zero:
        back_bytes = sent_bytes + FP16  # whole momenta return, and then the weights
    dp: Real = 0.0
    scatter: Real = 0.0
    for count, group, near in (
        (dense, ranks, local), (routed, ranks // layout.ep, max(1, local // layout.ep)),
    ):  # fmt: skip
        if count:
            sizes = (reduce_times * count * sent_bytes, gather_times * count * back_bytes)
            dp = dp + _all_reduce_s(rates, cluster, group, near, *sizes)
            if layout.zero == 3:
                scatter = scatter + _all_reduce_s(rates, cluster, group, near, sizes[0], 0.0)
    window = layer * layers / v
    dp_exposed: Real = 0.0
    if ranks > 1 and layout.zero == 3:
        once = gemm + attention + rest
        ahead = m * (layers * once + (head / 3 if p == 1 else 0.0))
        behind = m * (layers * (2 * once + gathering + recompute) + (head * 2 / 3 if p == 1 else 0.0))
        slower = np.maximum(e.communication, 1.0)
        cost = 0.0 if facts.hidden_is_free else np.minimum(e.communication, 1.0)
        dp_exposed = _zero3_exposed_s(slower * dp, slower * scatter, ahead, behind, m * layers, cost)
    elif ranks > 1:
        dp_exposed = dp - np.minimum((1 - e.communication) * dp, window)

    shard = numbers / ranks if layout.zero else numbers
    optimizer = shard * OPTIMIZER_BYTES / rates.hbm
    codec = _codec_s(model, layout, cluster, compression, facts, numbers, shard)

    # the stage with the output layer may hold fewer layers; the slower kind sets the pace
    spare = 1 if layers * p > model.layers else 0
    last = head - spare * layer
    pace = np.maximum(last, 0.0) if p > 1 else head
    work = m * layers
    parts: dict[str, Real] = {
        "gemm": work * 3 * gemm + m * pace,
        "attention": work * 3 * attention,
        "elementwise": work * (3 * rest + gathering),
        "recompute": work * recompute,
        "tp": work * tp,
        "cp": work * cp,
        "ep": work * ep,
        "pp": m * pp,
        "bubble": (p - 1) / v * (layers * layer + pp / v),
        "dp_exposed": dp_exposed,
        "optimizer": optimizer,
        "codec": codec,
    }
    iteration = sum(parts[name] for name in PARTS)
    parts["dp_total"] = dp
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


def _codec_s(
    model: Transformer, layout: Layout, cluster: Cluster, compression: Compression | None, facts: Facts,
    numbers: float, shard: float,
) -> Real:  # fmt: skip
    """Encoding and decoding, none of it hidden. Bytes touched at a share of the memory bandwidth, or elements at the
    measured speed."""
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
    return touched / (cluster.hbm_bytes_per_s * compression.hbm_fraction)

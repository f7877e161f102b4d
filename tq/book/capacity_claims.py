"""Rules on what fits and what it costs in bytes: over the results of `impact-memory`, and over the formulas of
`tq.systems` for states, pipelines, collectives, checkpoints and single GPUs; see ``tq.book.claims``.

Prices and failure rates that a formula needs stand beside it with their source; nothing here is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tq.book.arithmetic import GIB, LOOSE, NF4_DQ, TIGHT, Numbers, Sum
from tq.book.ledger import Claim, Facts, Finding, Rule, graded
from tq.systems import Layout, Transformer, memory, network
from tq.systems.network import Link

MEMORY, SINGLE, FAILURES = "impact-memory", "offload-and-single-gpu", "checkpoints-and-failures"
KEEPING = ("none", "none-fused", "selective")  # settings that keep activations; "full" keeps the layers' inputs
Readings = Callable[[], dict[str, float | Numbers]]


# --- over the chapter's results -------------------------------------------------------------------------------


def batch_factor(claim: Claim, facts: Facts) -> Finding:
    """Every model and setting reaches the low end; in part if the settings that keep activations do."""
    low, _ = claim.ends()
    gains = {s: [facts(MEMORY, f"gain/{size}/{s}") for size in ("7b", "13b", "70b")] for s in (*KEEPING, "full")}
    kept = [g for s in KEEPING for g in gains[s]]
    every = all(g >= low for each in gains.values() for g in each)
    instead = [facts(MEMORY, f"recompute-gain/{size}") for size in ("7b", "13b", "70b")]
    text = f"{'holds ' if min(kept) >= low else ''}against a run that keeps its activations: {min(kept):.1f} to "
    text += f"{max(kept):.1f} times the batch; against one that recomputes every layer {min(gains['full']):.1f} to "
    text += f"{max(gains['full']):.1f}. Recomputation alone gives {min(instead):.0f} to {max(instead):.0f}. Needed are "
    text += f"{facts(MEMORY, 'needed/2'):.0%} of the bytes for two and {facts(MEMORY, 'needed/3'):.0%} for three"
    formula = "m = 1 / (1 - c + c / r), r = 16 / 4.25"
    return Finding(graded(every, min(kept) >= low), text, "Largest batches measured on a GPU.", "medium", formula)


def _batch_row(size: str) -> Rule:
    def judge(claim: Claim, facts: Facts) -> Finding:
        """Every setting inside the range, or at most 15 % above; in part if some are."""
        low, high = claim.ends()
        found = {s: facts(MEMORY, f"table/{size}/{s}/batch") for s in (*KEEPING, "full")}
        context = {s: facts(MEMORY, f"table/{size}/{s}/context") for s in found}
        yes = [s for s, batch in found.items() if low <= batch <= high * 1.15]
        text = "context and recomputation, which decide it, are not given: from the same start codes lead to "
        text += ", ".join(f"{found[s]:.0f} ({s}, {context[s]:.0f} tokens a sequence)" for s in found)
        text += ". ZeRO-3 over 64 GPUs of 80 GB"
        verdict = graded(len(yes) == len(found), bool(yes))
        return Finding(verdict, text, "A statement of context and sharding; peak memory of a GPU.", "medium")

    return judge


def training_time(claim: Claim, facts: Facts) -> Finding:
    """The low end saved on every network; in part if on some, or by codes in place of recomputation."""
    low = claim.ends()[0] / 100
    most = {n: facts(MEMORY, f"time/{n}/coded/most") for n in ("400g", "100g", "25g")}
    free, instead = facts(MEMORY, "time/400g/free/most"), facts(MEMORY, "time/instead-of-recompute")
    yes = [n for n, saved in most.items() if saved >= low]
    text = f"by the model a larger batch saves at most {most['400g']:.1%} of the time on ports of 400 Gbit/s "
    text += f"({free:.1%} if the codec took none), {most['100g']:.1%} at 100 and {most['25g']:.0%} at 25, where ZeRO-3 "
    text += f"gathers weights over a link too slow for it; codes in place of full recomputation save {instead:.0%}"
    verdict = graded(len(yes) == len(most), bool(yes) or instead >= low)
    return Finding(verdict, text, "Throughput by batch measured on a GPU.", "low")


def tensor_parallelism(claim: Claim, facts: Facts) -> Finding:
    """Nearly every layout that starts as claimed arrives as claimed; in part if some do."""
    reach, keep, nothing = (facts(MEMORY, f"tp/{what}") for what in ("reach", "keep", "nothing"))
    text = f"of {facts(MEMORY, 'tp/layouts'):.0f} layouts that hold 1 or 2 sequences with TP8, {reach:.0%} hold 4 with "
    text += (
        f"TP4 and codes, {keep:.0%} at least what they held before, {nothing:.0%} none at all: activations of a GPU "
    )
    text += "grow by 4 x 2 = 8 against a ratio of 3.8, and its states double"
    change = "A statement of pipeline stages, sharding and context."
    return Finding(graded(reach >= 0.9, reach > 0), text, change, "high", "4 * (8 / 4) / 3.76")


def gpu_count(claim: Claim, facts: Facts) -> Finding:
    """The least number of GPUs halves; in part if codes make half of the tensor parallelism fit somewhere."""
    least = {(n, r): facts(MEMORY, f"least/{n}/{r}") for n in ("plain", "coded") for r in ("none", "full")}
    halves = all(least["coded", r] <= 0.55 * least["plain", r] for r in ("none", "full"))
    enabled = facts(MEMORY, "tp/enabled")
    text = (
        f"in {enabled:.0%} of the layouts codes make TP4 fit where it did not, so their number may halve; but 70B fits "
    )
    text += f"{least['plain', 'none']:.0f} GPUs without codes and {least['coded', 'none']:.0f} with them. Count is not "
    text += f"cost: 128 in place of 256 take {facts(MEMORY, 'hours/halved'):.2f} times the GPU-hours without codes and "
    text += f"{facts(MEMORY, 'hours/halved-coded'):.2f} with them, {facts(MEMORY, 'hours/coded'):.2f} on all 256"
    change = "A run whose GPU-hours fall with the number of GPUs."
    return Finding(graded(halves, enabled > 0), text, change, "medium", "cost = GPUs * hours * price")


# --- over formulas --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Within(Sum):
    """A claim of a range or of a bound: a reading agrees between the two ends of `claimed`, `within` wider."""

    def _agrees(self, value: float | Numbers, claimed: float | Numbers) -> bool:
        assert isinstance(claimed, tuple) and not isinstance(value, tuple)
        return claimed[0] * (1 - self.within) <= value <= claimed[1] * (1 + self.within)


def _zero(stage: int, ranks: int) -> float:
    """How many times fewer bytes of weights, gradients and states a rank of 7B holds, at 16 bytes a parameter."""
    model = Transformer.preset("llama2-7b")
    held = [memory(model, Layout(dp=ranks, global_batch=ranks, zero=z), gradient_bytes=2.0) for z in (0, stage)]
    before, after = (m.weights + m.gradients + m.states for m in held)
    return before / after


def _zeros(stage: int, *, limit: float) -> Readings:
    return lambda: {
        "on 8 GPUs": _zero(stage, 8), "on 64": _zero(stage, 64), "on 1,024": _zero(stage, 1024), "in the limit": limit,
    }  # fmt: skip


def _gathered() -> float:
    """Bytes of a rank of 64 under ZeRO-3, states and one gathered layer of 7B, over a 64th of all states."""
    layers = Transformer.preset("llama2-7b").layers
    return (16 / 64 + 2 / layers) / (16 / 64)


def _saved(sequences: int, layers_kept: int | None = None) -> float:
    """Per cent that a GPU saves where activations and the 16-bit weights of 7B, or of so many layers, stay on it."""
    model = Transformer.preset("llama2-7b")
    layout = Layout(micro_batch=max(1, sequences), global_batch=max(1, sequences))
    held = memory(model, layout, gradient_bytes=2.0, flash=True)
    activations = held.activations + held.working if sequences else 0.0
    states = held.weights + held.gradients + held.states
    kept = held.weights * (1.0 if layers_kept is None else layers_kept / model.layers)
    return 100 * (states - kept) / (states + activations)


def _bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle per cent of a pipeline: (p - 1) / (v m + p - 1) [Narayanan et al. 2021]."""
    return 100 * (stages - 1) / (chunks * micro_batches + stages - 1)


def _ring_over_tree(payload_bytes: float, ranks: int = 10_000) -> float:
    """Seconds of a ring over those of a tree, 50 GB/s and 5 us a round; both move 2 (n - 1) / n of the bytes."""
    ring = network.ring_s(payload_bytes / 4, ranks, Link(50e9, 5e-6))
    tree = Link(50e9).seconds(network.ring_bytes(payload_bytes / 4, ranks)) + 2 * math.ceil(math.log2(ranks)) * 5e-6
    return ring / tree


# 419 unexpected interruptions of 16,384 GPUs in 54 days: S2-010, Llama 3 (arXiv:2407.21783), table 5
GPU_HOURS_PER_FAILURE = 16384 * 54 * 24 / 419
BLOB = 405e9 * 12  # bytes of weights and moments of 405B
USD_B200 = 4.40  # an hour, the price of the page that S2-005 rests on


def _interval_min(gpus: int, write_s: float) -> float:
    """Young and Daly's interval sqrt(2 delta M) in minutes."""
    return math.sqrt(2 * write_s * GPU_HOURS_PER_FAILURE * 3600 / gpus) / 60


def _lost(gpus: int, write_s: float) -> float:
    """Share of the time at that interval: writing, and half an interval for each failure."""
    tau = _interval_min(gpus, write_s) * 60
    return write_s / tau + tau / 2 / (GPU_HOURS_PER_FAILURE * 3600 / gpus)


def _idle_usd(stall_s: float) -> float:
    """Of 128 GPUs in a month of 1,440 checkpoints."""
    return 1440 * stall_s / 3600 * 128 * USD_B200


def _stored_usd(ratio: float, usd_per_gb_month: float) -> float:
    """What lossless compression saves of the storage of a month's checkpoints of 70B, all of them kept."""
    return 1440 * 70e9 * 12 / 1e9 * usd_per_gb_month * (1 - 1 / ratio)


def _kv_gb(heads: int, tokens: float) -> float:
    """Keys and values of one request of a 70B model, 80 layers of heads of 128, 16 bit."""
    return 2 * 80 * heads * 128 * 2 * tokens / 1e9


NVME = 7.45  # GB/s, nvme-gen4 of data/stores.csv
_OWNED_USD = 3000 + 0.6 * 3 * 8766 * 0.15  # a PC around a 4090 (assumed), 600 W at 15 cents a kWh
_CARD = "A 4090 at 80 TFLOP/s (half of its peak) against H100 at 400."
_YOUNG = "sqrt(2 delta M), M = 16384 * 54 d / 419 / GPUs"
_KEPT = "1,440 * 840 GB * price * (1 - 1 / ratio); storage_prices.csv lists 0.015 to 0.1 dollars a GB and month"
_BYTES = "2 (weight) + 2 (gradient) + 4 (master) + 8 (moments) bytes a parameter"

SUMS: dict[str, Sum] = {
    # --- sharding and pipelines -------------------------------------------------------------------------------
    "S1-005": Sum(
        "N * bytes a GPU / bytes of all states",
        lambda: {"for weights, gradients and states": 64 / _zero(3, 64), "with a gathered layer of 7B": _gathered()},
        "of 1/N", claimed=1.0, see=MEMORY, note="Activations are not sharded by it.",
    ),
    "S4-060": Sum("16 / (4 + 12 / n)", _zeros(1, limit=4.0), "x", see=MEMORY, note="Of the states; activations stay."),
    "S4-061": Sum("16 / (2 + 14 / n)", _zeros(2, limit=8.0), "x", see=MEMORY, note="Of the states; activations stay."),
    "S3-031": Sum(
        "16 over 4 + 12/n, 2 + 14/n, 16/n",
        lambda: {f"by stage {stage} on 64 GPUs": _zero(stage, 64) for stage in (1, 2, 3)}, "x", see=MEMORY,
    ),
    "S4-062": Sum(
        "two gathers of the weights and a scatter of the gradients, over an all-reduce: 3 S / 2 S",
        lambda: {"as bytes a step": 3 / 2}, "x", TIGHT,
    ),
    "S3-028": Sum(
        "(p - 1) / (v m + p - 1)",
        lambda: {
            "8 stages and 8 micro-batches": _bubble(8, 8), "8 and 10": _bubble(8, 10), "8 and 64": _bubble(8, 64),
            "8 and 10 with 4 chunks a stage": _bubble(8, 10, 4),
        }, "%", see=MEMORY,
    ),
    "S4-052": Sum(
        "world / (TP * PP * DP)",
        lambda: {"as the document counts": 16.0, "where experts are spread over data-parallel ranks": 1.0}, "x", TIGHT,
        note="In Megatron-LM and DeepSeek the expert ranks are taken out of the data-parallel ones.",
        confidence="medium",
    ),
    "S3-016": Sum(
        "2 (n - 1) / n S / B + rounds * 5 us; 2 (n - 1) rounds in a ring, 2 log2 n in a tree, n = 10,000, 50 GB/s",
        lambda: {"for 140 GB": _ring_over_tree(140e9), "for 1 MB": _ring_over_tree(1e6)}, "x", LOOSE,
        claimed=10_000 / 14, note="Rounds are latency; both move the same bytes.",
    ),
    "S3-018": Sum(
        "2 (n - 1) / n S / B + rounds * 5 us", lambda: {"as time of a ring over a tree": _ring_over_tree(140e9)}, "x",
        LOOSE, claimed=10_000 / 14, note="For 140 GB the bytes decide, which are the same.",
    ),
    "S3-014": Sum(
        "bandwidth of the hosts over that of the uplinks",
        lambda: {
            "16 nodes of 8 x 400G over 16 x 400G": 8.0, "32 such nodes over 8 x 200G": 64.0,
            "16 nodes of one 400G port over 16 x 400G": 1.0,
        }, "x", TIGHT, claimed=1.0, note="A fat tree has 1:1.",
    ),
    # --- what fits --------------------------------------------------------------------------------------------
    "S1-001": Sum(
        f"bytes / ({_BYTES})",
        lambda: {
            "in 24 GB of the card": 24 / 16, "with 256 GB of host memory": 280 / 16,
            "with 1.6 TB of host memory": 1600 / 16,
        }, "billion parameters",
        note=f"To hold is not to train: 1T tokens take {6 * 100e9 * 1e12 / 80e12 / 3.156e7:.0f} years at 80 TFLOP/s.",
        see=SINGLE,
    ),
    "S1-006": Within(
        "(states - weights) / (states + activations)",
        lambda: {
            "of states alone": _saved(0), "with one sequence of 4,096 tokens of 7B": _saved(1),
            "with four": _saved(4),
        }, "%", TIGHT, claimed=(50.0, 70.0), see=SINGLE,
    ),
    "S1-008": Within(
        "1 - (a layer's 16-bit weights + activations) / (states + activations)",
        lambda: {"of states alone": _saved(0, 1), "with one sequence of 4,096 tokens of 7B": _saved(1, 1)}, "%", 0.0,
        claimed=(90.0, 100.0), note="With states and all but one layer's weights elsewhere.", see=SINGLE,
    ),
    "S1-009": Within(
        "24 bytes a parameter read and written at 5 GB/s, over 6 FLOPs a parameter and token at 80 TFLOP/s",
        lambda: {f"at {n:,} tokens a step": 100 * 24 / 5e9 / (6 * n / 80e12) for n in (2**15, 2**17, 2**22)}, "%",
        claimed=(30.0, 50.0), note="Nothing overlaps; the size of the model cancels.", confidence="medium", see=SINGLE,
    ),
    "S3-019": Within(
        "tokens / tokens a step",
        lambda: {"for Llama 3 405B, 15.6T in steps of 16M": 15.6e12 / 16e6, "for 1.4T in steps of 4M": 1.4e12 / 4e6},
        "all-reduces", 0.0, claimed=(1e3, 9999.0), note="One a step is the least, so the claim understates.",
    ),
    "S3-052": Sum("16 / 2 bytes", lambda: {"if the 16-bit weights stay on the GPU": 16 / 2}, "x", LOOSE, see=SINGLE),
    "S3-045": Within(
        f"drives * {NVME} GB/s",
        lambda: {"of one PCIe 4.0 drive": NVME, "of two that are striped": 2 * NVME}, "GB/s", 0.0,
        claimed=(10.0, math.inf), see=SINGLE, note="Sequential reads as the maker prints them, data/stores.csv.",
    ),
    "S1-016": Sum(
        "GPUs * dollars", lambda: {"for 128 at 40,000 dollars": 128 * 0.04, "for 128 at 30,000": 128 * 0.03},
        "million dollars", confidence="medium", see="cost-structure",
        note="What an H100 costs with its share of node and network is assumed.",
        would_change="A quotation for a cluster.",
    ),
    "S1-020": Sum(
        "bytes of disk / 16 bytes a parameter",
        lambda: {"with 16 TB": 16 / 16, "with one drive of 2 TB": 2 / 16}, "trillion parameters", see=SINGLE,
        note=f"To hold is not to train: 20 tokens a parameter take {6e12 * 20e12 / 80e12 / 3.156e7:,.0f} years at "
        "80 TFLOP/s.",
    ),
    "S1-024": Sum(
        "dollars a GPU hour / TFLOP/s, rented over owned for three years",
        lambda: {
            f"against an H100 at {usd} dollars an hour": usd / 400 / (_OWNED_USD / (3 * 8766 * 80))
            for usd in (2.0, 4.4)
        }, "x", claimed=1000.0, see=SINGLE,
        note=f"{_CARD} The machine costs {_OWNED_USD:,.0f} dollars with its electricity.",
        would_change="Hardware that is a thousand times as cheap for the same work, not for a thousandth of it.",
    ),
    "S1-019": Within(
        "bytes / 80 GB",
        lambda: {"for all parameters at 16 bytes": 70 * 16 / 80, "for LoRA on bf16 weights": 70 * 2 / 80}, "GPUs",
        TIGHT, claimed=(8.0, math.inf), see=SINGLE,
    ),
    "S3-056": Within(
        "bytes / 80 GB", lambda: {"for inference in bf16": 7 * 2 / 80, "for training at 16 bytes": 7 * 16 / 80}, "GPUs",
        TIGHT, claimed=(0.0, 1.0), see=SINGLE,
    ),
    "S3-057": Within(
        "bytes / memory",
        lambda: {
            "70B in bf16 on 80 GB": 70 * 2 / 80, "70B in bf16 on 141 GB": 70 * 2 / 141,
            "70B at 4 bits on 80 GB": 0.5 * 70 / 80,
        }, "GPUs", 0.0, claimed=(1.0, math.inf), see=SINGLE,
    ),
    "S4-075": Within(
        "16 bytes a parameter / memory of 80 GB each",
        lambda: {"7B on 8": 7 * 16 / 640, "70B on 64": 70 * 16 / (64 * 80), "70B on 8": 70 * 16 / 640}, "of the memory",
        TIGHT, claimed=(0.0, 1.0), note="States alone.", see=MEMORY,
    ),
    "S4-064": Within(
        "2 * layers * KV heads * 128 * 2 bytes * tokens, of 141 GB",
        lambda: {
            "for 70B with 8 KV heads at 128K": _kv_gb(8, 131072), "at 1M": _kv_gb(8, 1048576),
            "with 64 KV heads at 128K": _kv_gb(64, 131072),
        }, "GB", 0.0, claimed=(0.0, 141.0), note="The cache of one request beside no weights.", confidence="medium",
    ),
    "S4-087": Within(
        "2 * layers * KV heads * 128 * 2 bytes * tokens",
        lambda: {
            "for 70B with 8 KV heads at 8K": _kv_gb(8, 8192), "with 64": _kv_gb(64, 8192),
            "with 8 at 1K": _kv_gb(8, 1024),
        }, "GB", claimed=(1.0, 99.0), note="A 70B shape; that of a 100B model is not given.", confidence="medium",
    ),
    "S4-090": Sum("64 / 8 heads", lambda: {"for 64 query heads on 8": 64 / 8}, "x", TIGHT),
    "S1-023": Within(
        f"70e9 * bits / 8, of 141 GB; {NF4_DQ:.4g} bits for NF4 with double quantization",
        lambda: {
            "with 4-bit weights and adapters": 70 * NF4_DQ / 8, "with adapters on bf16 weights": 70.0 * 2,
            "for all parameters at 16 bytes": 70.0 * 16,
        }, "GB", 0.0, claimed=(0.0, 141.0), note="Weights and states on one card of 141 GB.", see=SINGLE,
    ),
    "S3-068": Within(
        "(1 - a^(g+1)) / ((1 - a) (1 + g c)): g tokens guessed, accepted with a, a guess costs c [Leviathan 2023]",
        lambda: {f"for a = {a}, g = 5, c = 0.05": (1 - a**6) / ((1 - a) * 1.25) for a in (0.6, 0.8, 0.9)}, "x", 0.05,
        claimed=(2.0, 3.6), confidence="medium",
    ),
    "S3-036": Sum(
        "1 + 99 * share of misses, 1.1 GB read in a circle through 1 GB, the slow level 100 times slower",
        lambda: {
            "with the least recently used evicted: every read misses": 1 + 99 * 1.0,
            "with the best eviction": 1 + 99 * 0.1 / 1.1,
        }, "x", note="Random access misses a share of 9 % as well.", confidence="medium",
    ),
    # --- a single card ----------------------------------------------------------------------------------------
    "S1-015": Within(
        "GPUs * 400 / 80 - 1",
        lambda: {"against 128 H100": 100 * (128 * 400 / 80 - 1), "against 8": 100 * (8 * 400 / 80 - 1)}, "%",
        claimed=(30.0, 50.0), note=_CARD, see=SINGLE,
    ),
    "S1-030": Within(
        "GPUs * 400 / 80", lambda: {"against 128 H100": 128 * 400 / 80, "against 8": 8 * 400 / 80}, "x",
        claimed=(10.0, 20.0), note=_CARD, see=SINGLE,
    ),
    "S1-031": Within(
        "weights forward and backward, gradients out: 6 bytes a parameter and step",
        lambda: {"for 100B": 600.0, "for 7B": 42.0}, "GB", claimed=(10.0, 99.0), see=SINGLE,
    ),
    "S1-032": Within(
        "1,200 TB of endurance / 12 bytes a parameter and step, 100B",
        lambda: {
            "at a step in 8 minutes, what its transfers take at 5 GB/s": 1000 * 8 / 60 / 24 / 30.4,
            "at a step of 4M tokens at 80 TFLOP/s": 1000 * 6 * 100e9 * 4e6 / 80e12 / 86400 / 30.4,
        }, "months", claimed=(1.0, 12.0), confidence="medium", see=SINGLE,
        would_change="Another endurance than 1,200 TB, or states that stay in memory.",
    ),
    # --- checkpoints and failures -----------------------------------------------------------------------------
    "S2-005": Sum(
        "1,440 * stall * 128 * 4.40 dollars an hour; " + _YOUNG,
        lambda: {
            "with 4,526 GiB counted as GB at 5 GB/s": _idle_usd(BLOB / GIB / 5), "with GB": _idle_usd(BLOB / 5e9),
            "at Young and Daly's interval": _lost(128, BLOB / 5e9) * 730 * 128 * USD_B200,
        }, "dollars", see=FAILURES,
    ),
    "S2-006": Sum(
        "stall / interval; " + _YOUNG,
        lambda: {
            "of the 30 minutes": 100 * BLOB / GIB / 5 / 1800,
            "of interval and stall": 100 / (1 + 1800 / (BLOB / GIB / 5)),
            "at Young and Daly's interval": 100 * _lost(128, BLOB / 5e9),
        }, "%", see=FAILURES,
    ),
    "S2-008": Sum(
        "1,440 * 905 s * 128 * 4.40 * (1 - 1/1.38); " + _KEPT,
        lambda: {
            "of idle GPU time": _idle_usd(BLOB / GIB / 5) * (1 - 1 / 1.38),
            "of storage at 0.03": _stored_usd(1.38, 0.03),
            "of storage at 0.1": _stored_usd(1.38, 0.1),
        }, "dollars", note="The document calls it storage.", see=FAILURES,
    ),
    "S2-017": Within(
        _KEPT, lambda: {f"at {price} dollars": _stored_usd(1.27, price) for price in (0.015, 0.03, 0.1)}, "dollars",
        0.0, claimed=(10e3, 99e3), note="At a ratio of 1.27, if every checkpoint of a month is kept.", see=FAILURES,
    ),
    "S2-011": Within(
        _YOUNG,
        lambda: {
            "for 16,384 GPUs and 60 s": _interval_min(16384, 60), "for 1,024": _interval_min(1024, 60),
            "for 128 and the 972 s of 405B at 5 GB/s": _interval_min(128, BLOB / 5e9),
        }, "minutes", claimed=(15.0, 30.0), note="At the failure rate that Llama 3 saw.", see=FAILURES,
    ),
    "S4-083": Sum(
        _YOUNG,
        lambda: {f"for {n:,} GPUs and 60 s": _interval_min(n, 60) for n in (16384, 2048, 128)}, "minutes", LOOSE,
        claimed=60.0, note="At the failure rate that Llama 3 saw.", see=FAILURES,
    ),
    "S4-081": Within(
        "25,000 * 24 / (16384 * 54 * 24 / 419)",
        lambda: {"at the rate that Llama 3 saw": 25_000 * 24 / GPU_HOURS_PER_FAILURE}, "a day", 0.0,
        claimed=(1.0, math.inf), see=FAILURES,
    ),
    "S4-082": Sum(
        "500e9 * bytes",
        lambda: {"with both moments": 500e9 * 10 / 1e12, "with a master copy too": 500e9 * 14 / 1e12}, "TB",
        note="1 TB is the 16-bit weights alone.", see=FAILURES,
    ),
}  # fmt: skip

RULES: dict[str, Rule] = {
    "S0-009": batch_factor,
    "S0-045": _batch_row("7b"),
    "S0-047": _batch_row("13b"),
    "S0-046": training_time,
    "S0-048": tensor_parallelism,
    "S0-049": gpu_count,
    "S0-010": gpu_count,
    **SUMS,
}

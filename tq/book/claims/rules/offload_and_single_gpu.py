"""Rules over offloading, and over what the documents say of single devices."""

from __future__ import annotations

import math

from tq.book.claims import ledger
from tq.book.claims.formulas import LOOSE, NF4_DQ, STORED, TIGHT, Formula, RangeFormula, at_least
from tq.book.claims.ledger import (
    NOT_CHECKABLE,
    NOT_REPRODUCED,
    REASONS,
    REPRODUCED,
    Claim,
    Finding,
    Results,
    Rule,
    verdict_for,
)
from tq.systems import Layout, Transformer, caching, memory, offload
from tq.systems.offload import Place, Plan

CHAPTER = "offload-and-single-gpu"
READ = "the document's other claims, data/claims.csv"
CARD_FLOPS, H100_FLOPS = 80e12, 400e12  # a second: half of a 4090's peak, and what runs on H100 realise
CARD = "A 4090 at 80 TFLOP/s (half of its peak) against H100 at 400."
DRIVE = Place("NVMe", 5e9, 5e9, False)
BYTES = "2 (weight) + 2 (gradient) + 4 (master) + 8 (moments) bytes a parameter"
YEAR_S, HOURS_A_YEAR = 3.156e7, 8766
OWNED_USD = 3000 + 0.6 * 3 * HOURS_A_YEAR * 0.15  # a PC around a 4090 (assumed), 600 W at 15 cents a kWh


def slower_with_offload(claim: Claim, results: Results) -> Finding:
    """An update in the host's memory slows this step by as much as they say; in part if a streamed one does."""
    low, high = (end / 100 for end in claim.ends())
    there = results.on_gpu(CHAPTER, "step/torchao/fp32") - 1
    streamed = results.on_gpu(CHAPTER, "step/host/fp32") - 1
    verdict = verdict_for(low <= there <= high, low <= streamed <= high)
    text = (
        f"at 355M and 8,192 tokens a step the update on the host (torchao) adds {there:.0%} and moments streamed "
        f"from its memory {streamed:.0%}; it falls as the tokens of a step rise"
    )
    return Finding(verdict, text, "The tokens of the step that was meant.", "medium")


def not_quantization(claim: Claim, results: Results) -> Finding:
    """Contradicted where the same document's own claims rest on quantized states."""
    own = [c.id for c in ledger.claims() if c.seed == claim.seed and "8-bit optimizer" in c.claim.lower()]
    if not own:
        return Finding(REPRODUCED, "the document names no quantized method", "One that it names.", "medium", READ)
    text = f"the same document counts 8-bit optimizers, which quantize, among its methods ({', '.join(own)})"
    return Finding(NOT_REPRODUCED, text, "A statement which of the methods the breakthrough is.", "medium", READ)


def scaling_on_one_device(claim: Claim, results: Results) -> Finding:
    """Scaling efficiency compares several devices with one."""
    text = "scaling efficiency is the speed of several devices over that of one; for a single device it is not defined"
    return Finding(NOT_CHECKABLE, text, "What was divided by what.")


def tuned_on_one_card(claim: Claim, results: Results) -> Finding:
    """Unsourced; what arithmetic can add is that the 4-bit weights alone do not fit the card."""
    size = claim.number() * NF4_DQ / 8
    why, change = REASONS["source"]
    text = (
        f"{why}; at {NF4_DQ:.4g} bits the weights alone take {size:.1f} GB and {'fit' if size <= 24 else 'do not fit'} "
        "the card's 24 GB without offload"
    )
    return Finding(NOT_CHECKABLE, text, change)


# --- over formulas --------------------------------------------------------------------------------------------


def _saved(sequences: int, layers_kept: int | None = None) -> float:
    """Per cent that a GPU saves where activations and the 16-bit weights of 7B, or of so many layers, stay on it."""
    model = Transformer.preset("llama2-7b")
    layout = Layout(micro_batch=max(1, sequences), global_batch=max(1, sequences))
    held = memory(model, layout, gradient_bytes=2.0, flash=True)
    activations = held.activations + held.working if sequences else 0.0
    states = held.weights + held.gradients + held.states
    kept = held.weights * (1.0 if layers_kept is None else layers_kept / model.layers)
    return 100 * (states - kept) / (states + activations)


def _step_s(parameters: float, tokens: float) -> float:
    """Seconds of a step, or of a whole run, on the card."""
    return offload.FLOPS * parameters * tokens / CARD_FLOPS


def _years(parameters: float, tokens: float) -> float:
    return _step_s(parameters, tokens) / YEAR_S


def _months_of_a_drive(step_s: float) -> float:
    """That 1,200 TB of endurance last if 12 bytes a parameter of 100B are written each step."""
    return 1200e12 / (12 * 100e9) * step_s / 86400 / 30.4


def _loop(policy: str) -> float:
    """Mean time of a read where 1.1 GB go in a circle through 1 GB and a miss takes a hundred times as long."""
    return caching.slowdown(caching.loop_miss_share(1.1, 1.0, policy), 100)


RULES: dict[str, Rule] = {
    "S1-001": Formula(
        f"bytes / ({BYTES})",
        lambda: {
            "in 24 GB of the card": 24 / 16, "with 256 GB of host memory": 280 / 16,
            "with 1.6 TB of host memory": 1600 / 16,
        }, "billion parameters",
        note=f"To hold is not to train: 1T tokens take {_years(100e9, 1e12):.0f} years at 80 TFLOP/s.", see=CHAPTER,
    ),
    "S1-002": not_quantization,
    "S1-004": scaling_on_one_device,
    "S1-006": RangeFormula(
        "(states - weights) / (states + activations)",
        lambda: {
            "of states alone": _saved(0), "with one sequence of 4,096 tokens of 7B": _saved(1),
            "with four": _saved(4),
        }, "%", TIGHT, see=CHAPTER,
    ),
    "S1-007": slower_with_offload,
    "S1-008": RangeFormula(
        "1 - (a layer's 16-bit weights + activations) / (states + activations)",
        lambda: {"of states alone": _saved(0, 1), "with one sequence of 4,096 tokens of 7B": _saved(1, 1)}, "%", 0.0,
        claimed=lambda claim: (claim.number(), 100.0), see=CHAPTER,
        note="With states and all but one layer's weights elsewhere.",
    ),
    "S1-009": RangeFormula(
        "24 bytes a parameter read and written at 5 GB/s, over 6 FLOPs a parameter and token at 80 TFLOP/s",
        lambda: {
            f"at {n:,} tokens a step": 100 * float(offload.slowdown(n, Plan(4.0, 12.0, 12.0, 12.0), DRIVE, CARD_FLOPS))
            for n in (2**15, 2**17, 2**22)
        }, "%", note="Nothing overlaps; the size of the model cancels.", confidence="medium", see=CHAPTER,
    ),
    "S1-015": RangeFormula(
        "GPUs * 400 / 80 - 1",
        lambda: {"against 128 H100": 100 * (128 * H100_FLOPS / CARD_FLOPS - 1),
            "against 8": 100 * (8 * H100_FLOPS / CARD_FLOPS - 1),
        }, "%",
        note=CARD, see=CHAPTER,
    ),
    "S1-018": tuned_on_one_card,
    "S1-019": RangeFormula(
        "bytes / 80 GB",
        lambda: {"for all parameters at 16 bytes": 70 * 16 / 80, "for LoRA on bf16 weights": 70 * 2 / 80}, "GPUs",
        TIGHT, claimed=at_least, see=CHAPTER,
    ),
    "S1-020": Formula(
        "bytes of disk / 16 bytes a parameter",
        lambda: {"with 16 TB": 16 / 16, "with one drive of 2 TB": 2 / 16}, "trillion parameters", see=CHAPTER,
        note=f"To hold is not to train: 20 tokens a parameter take {_years(1e12, 20e12):,.0f} years at 80 TFLOP/s.",
    ),
    "S1-023": RangeFormula(
        f"70e9 * bits / 8, of 141 GB; {NF4_DQ:.4g} bits for NF4 with double quantization",
        lambda: {
            "with 4-bit weights and adapters": 70 * NF4_DQ / 8, "with adapters on bf16 weights": 70.0 * 2,
            "for all parameters at 16 bytes": 70.0 * 16,
        }, "GB", 0.0, claimed=(0.0, 141.0), note="Weights and states on one card of 141 GB.", see=CHAPTER,
    ),
    "S1-024": Formula(
        "dollars a GPU hour / TFLOP/s, rented over owned for three years",
        lambda: {
            f"against an H100 at {usd} dollars an hour": usd / H100_FLOPS * 3 * HOURS_A_YEAR * CARD_FLOPS / OWNED_USD
            for usd in (2.0, 4.4)
        }, "x", see=CHAPTER,
        note=f"{CARD} The machine costs {OWNED_USD:,.0f} dollars with its electricity.",
        would_change="Hardware that is a thousand times as cheap for the same work, not for a thousandth of it.",
    ),
    "S1-030": RangeFormula(
        "GPUs * 400 / 80",
        lambda: {"against 128 H100": 128 * H100_FLOPS / CARD_FLOPS, "against 8": 8 * H100_FLOPS / CARD_FLOPS}, "x",
        note=CARD, see=CHAPTER,
    ),
    "S1-031": RangeFormula(
        "weights forward and backward, gradients out: 6 bytes a parameter and step",
        lambda: {"for 100B": 6 * 100.0, "for 7B": 6 * 7.0}, "GB", claimed=(10.0, 99.0), see=CHAPTER,
    ),
    "S1-032": RangeFormula(
        "1,200 TB of endurance / 12 bytes a parameter and step, 100B",
        lambda: {
            "at a step in 8 minutes, what its transfers take at 5 GB/s": _months_of_a_drive(24 * 100e9 / 5e9),
            "at a step of 4M tokens at 80 TFLOP/s": _months_of_a_drive(_step_s(100e9, 4e6)),
        }, "months", claimed=(1.0, 12.0), confidence="medium", see=CHAPTER,
        would_change="Another endurance than 1,200 TB, or states that stay in memory.",
    ),
    "S3-036": Formula(
        "1 + 99 * share of misses, 1.1 GB read in a circle through 1 GB, the slow level 100 times slower",
        lambda: {
            "with the least recently used evicted: every read misses": _loop("lru"),
            "with the best eviction": _loop("best"),
        }, "x", note="Random access misses a share of 9 % as well.", confidence="medium",
    ),
    "S3-052": Formula(
        "16 / 2 bytes", lambda: {"if the 16-bit weights stay on the GPU": 16 / 2}, "x", LOOSE, see=CHAPTER
    ),
    "S3-055": Formula(
        "50 MB of cache (S3-041) * 8 / bits",
        lambda: {"in bf16": 50e6 / 2 / 1e9, "at 4 bits with scales": 50e6 * 8 / STORED / 1e9},
        "billion parameters", note="That is what fits.", would_change="A GPU with a cache of half a gigabyte.",
    ),
    "S3-056": RangeFormula(
        "bytes / 80 GB", lambda: {"for inference in bf16": 7 * 2 / 80, "for training at 16 bytes": 7 * 16 / 80}, "GPUs",
        TIGHT, claimed=(0.0, 1.0), see=CHAPTER,
    ),
    "S3-057": RangeFormula(
        "bytes / memory",
        lambda: {
            "70B in bf16 on 80 GB": 70 * 2 / 80, "70B in bf16 on 141 GB": 70 * 2 / 141,
            "70B at 4 bits on 80 GB": 0.5 * 70 / 80,
        }, "GPUs", 0.0, claimed=(1.0, math.inf), see=CHAPTER,
    ),
}  # fmt: skip

"""The three calculators of the book's page as closed forms: savings, memory, codec. `calculators.js` mirrors them.

Each takes a case, a mapping of every field in `FIELDS`, and returns numbers. They are deliberately simple: what they
leave out is what `tq.systems` adds. A field outside its range, missing or unknown raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tq.economics.breakeven import GBIT, Step

Case = Mapping[str, float]
Result = dict[str, float | None]
GIB = 2.0**30


@dataclass(frozen=True)
class Field:
    """One input. choices: {value: words} where only these are accepted; whole: integers only."""

    name: str
    label: str
    default: float
    low: float
    high: float
    unit: str = ""
    whole: bool = False
    choices: tuple[tuple[float, str], ...] = ()

    def check(self, value: object) -> float:
        choices = ", ".join(f"{each:g}" for each, _ in self.choices)
        accepted = f"one of {choices}" if choices else f"{'an int' if self.whole else 'a number'} "
        accepted += "" if choices else f"from {self.low:g} to {self.high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.name} must be {accepted}, got {value!r}")
        good = self.low <= value <= self.high and (not self.whole or value == math.floor(value))
        if not good or self.choices and value not in [each for each, _ in self.choices]:
            raise ValueError(f"{self.name} must be {accepted}, got {value:g}")
        return float(value)


_BITS = Field("bits", "Bits of the codec", 4, 1, 8, "bits", whole=True)
_BLOCK = Field("block", "Numbers a block", 128, 1, 65536, whole=True)
_SCALE = Field("scale_bits", "Scale of a block", 32, 16, 32, "bits", choices=((16, "16 bits"), (32, "32 bits")))

FIELDS: dict[str, tuple[Field, ...]] = {
    "savings": (
        Field("parameters_b", "Parameters of the model", 70, 1e-3, 1e5, "billion"),
        Field("tokens_b", "Tokens of the run", 1400, 1e-3, 1e6, "billion"),
        Field("batch_m", "Tokens a step", 4, 1e-3, 1e4, "million"),
        Field("gpus", "GPUs", 256, 1, 1e6, whole=True),
        Field("gpus_per_replica", "GPUs a replica (tensor × pipeline)", 8, 1, 1e6, whole=True),
        Field("tflops", "Speed of a GPU without the exchange", 400, 1e-2, 1e5, "TFLOP/s"),
        Field("link_gbit", "Network link a GPU", 100, 1e-3, 1e6, "Gbit/s"),
        Field("base_bits", "Gradients without compression", 16, 16, 32, "bits", choices=((16, "bf16"), (32, "fp32"))),
        _BITS, _BLOCK, _SCALE,
        Field("overhead", "Overhead of the codec on the rest of the step", 1.05, 1, 100, "×"),
        Field("overlap", "Share of the rest that can hide the exchange", 0, 0, 1, "0 to 1"),
        Field("usd_per_gpu_hour", "Price", 4, 1e-3, 1e4, "USD an hour and GPU"),
        Field("uncertainty", "Link and speed, give or take", 0.2, 0, 0.9, "share"),
    ),
    "memory": (
        Field("layers", "Layers", 80, 1, 1e4, whole=True),
        Field("hidden", "Hidden width", 8192, 1, 1e6, whole=True),
        Field("heads", "Attention heads", 64, 1, 1e5, whole=True),
        Field("seq", "Sequence length", 4096, 1, 1e8, whole=True),
        Field("vocab", "Vocabulary", 32000, 1, 1e8, whole=True),
        Field("tp", "Tensor-parallel GPUs", 8, 1, 1e4, whole=True),
        Field("pp", "Pipeline stages", 4, 1, 1e4, whole=True),
        Field("dp", "Data-parallel replicas", 8, 1, 1e6, whole=True),
        Field("micro_batch", "Sequences a micro-batch", 1, 1, 1e5, whole=True),
        Field("micro_batches", "Micro-batches a step", 16, 1, 1e6, whole=True),
        Field("zero", "ZeRO stage", 1, 0, 3, choices=((0, "0"), (1, "1"), (2, "2"), (3, "3")), whole=True),
        Field(
            "recompute", "Recomputed in the backward pass", 1, 0, 2, whole=True,
            choices=((0, "nothing"), (1, "attention scores (or fused)"), (2, "every layer")),
        ),
        Field("sequence_parallel", "Sequence parallelism", 1, 0, 1, choices=((0, "no"), (1, "yes")), whole=True),
        Field("gradient_bytes", "Gradients", 4, 2, 4, "bytes", choices=((2, "16 bits"), (4, "32 bits")), whole=True),
        Field("gpu_gib", "Memory of a GPU", 80, 1, 1e4, "GiB"),
        Field("reserve_gib", "Kept free", 6, 0, 1e4, "GiB"),
        _BITS, _BLOCK, _SCALE,
        Field("coded", "Share of the kept activations that is coded", 0.9, 0, 1, "0 to 1"),
    ),
    "codec": (_BITS, _BLOCK, _SCALE, Field("numbers", "Numbers in the tensor", 1e6, 1, 1e15, whole=True)),
}  # fmt: skip


def defaults(calculator: str) -> dict[str, float]:
    """The case that a calculator opens with."""
    return {field.name: field.default for field in FIELDS[calculator]}


def _read(calculator: str, case: Case) -> dict[str, float]:
    fields = {field.name: field for field in FIELDS[calculator]}
    unknown, missing = set(case) - set(fields), set(fields) - set(case)
    if unknown or missing:
        odd = sorted(unknown) or sorted(missing)
        raise ValueError(
            f"{'unknown' if unknown else 'missing'}: {', '.join(odd)}; {calculator} takes {', '.join(fields)}"
        )
    return {name: field.check(case[name]) for name, field in fields.items()}


def _stored_bits(x: Case) -> float:
    return x["bits"] + x["scale_bits"] / x["block"]


# --- 1: what would compression save ---------------------------------------------------------------------------


def savings(case: Case) -> Result:
    """Step time, cost and saving with and without compressed gradients: data-parallel traffic alone, one flat network.

    The interval takes link and speed at both ends of `uncertainty`: the saving grows with exchange over compute, so its
    ends are (fast link, slow GPUs) and (slow link, fast GPUs). pays: 1 yes, 0 depends on these, -1 no.
    breakeven_gbit: above this link it does not pay; None, at any link.
    """
    x = _read("savings", case)
    if x["gpus_per_replica"] > x["gpus"]:
        raise ValueError(f"gpus_per_replica must be at most gpus={x['gpus']:g}, got {x['gpus_per_replica']:g}")
    ratio = x["base_bits"] / _stored_bits(x)
    if ratio <= 1:
        raise ValueError(f"bits must leave less than base_bits={x['base_bits']:g} with scales, got {_stored_bits(x):g}")

    def at(link: float, speed: float) -> tuple[float, float, Step]:
        step = Step.of(
            x["parameters_b"] * 1e9, x["batch_m"] * 1e6, x["gpus"], x["gpus_per_replica"], x["tflops"] * speed,
            x["base_bits"],
        )  # fmt: skip
        codec_s = (x["overhead"] - 1) * step.compute_s
        rate = x["link_gbit"] * link
        plain = step.seconds(rate, 1.0, 0.0, x["overlap"])
        return float(plain), float(step.seconds(rate, ratio, codec_s, x["overlap"])), step

    u = x["uncertainty"]
    plain, coded, step = at(1, 1)
    ends = [at(1 + u, 1 - u), at(1 - u, 1 + u)]
    steps = x["tokens_b"] * 1e3 / x["batch_m"]
    usd_per_s = x["gpus"] * x["usd_per_gpu_hour"] / 3600
    compute = float(step.compute_s)
    saved = [1 - c / p for p, c, _ in ends]
    breakeven = float(step.breakeven_gbit(ratio, (x["overhead"] - 1) * compute, x["overlap"]))
    exposed = float(step.exposed_s(x["link_gbit"], 1.0, x["overlap"]))
    coded_exposed = float(step.exposed_s(x["link_gbit"], ratio, x["overlap"]))
    return {
        "ratio": ratio,
        "compute_s": compute,
        "exchange_s": float(step.wire_bytes) / (x["link_gbit"] * GBIT),
        "share": exposed / plain,
        "plain_s": plain,
        "coded_s": coded,
        "saving": 1 - coded / plain,
        "saving_low": saved[0],
        "saving_high": saved[1],
        "plain_hours": steps * plain / 3600,
        "coded_hours": steps * coded / 3600,
        "plain_usd": steps * plain * usd_per_s,
        "coded_usd": steps * coded * usd_per_s,
        "saved_usd": steps * (plain - coded) * usd_per_s,
        "saved_usd_low": steps * (ends[0][0] - ends[0][1]) * usd_per_s,
        "saved_usd_high": steps * (ends[1][0] - ends[1][1]) * usd_per_s,
        "breakeven_overhead": (plain - coded_exposed) / compute,
        "breakeven_gbit": breakeven if math.isfinite(breakeven) else None,
        "pays": 1.0 if saved[0] > 0 else -1.0 if saved[1] <= 0 else 0.0,
    }


# --- 2: memory and the largest batch --------------------------------------------------------------------------


def memory(case: Case) -> Result:
    """Memory of the first pipeline stage by part, GiB, without and with coded activations, and the largest micro-batch.

    GPT shape with an MLP of four times the width: Korthikanti's s b h (10 + 24 / t + 5 a s / (h t)) bytes a layer, the
    first term over t too with sequence parallelism; 12 bytes of states a parameter, split by ZeRO.
    """
    x = _read("memory", case)
    for name, of in (("heads", "hidden"), ("tp", "heads")):
        if x[of] % x[name]:
            raise ValueError(f"{name} must divide {of}={x[of]:g}, got {x[name]:g}")
    if x["pp"] > x["layers"]:
        raise ValueError(f"pp must be at most layers={x['layers']:g}, got {x['pp']:g}")
    h, t, s = x["hidden"], x["tp"], x["seq"]
    stage = math.ceil(x["layers"] / x["pp"])
    parameters = x["layers"] * (12 * h * h + 13 * h) + (x["vocab"] + s) * h
    numbers = (stage * (12 * h * h + 13 * h) + (x["vocab"] + s) * h) / t
    weights = 2 * numbers / (x["dp"] if x["zero"] >= 3 else 1)
    gradients = x["gradient_bytes"] * numbers / (x["dp"] if x["zero"] >= 2 else 1)
    states = 12 * numbers / (x["dp"] if x["zero"] >= 1 else 1)
    gathered = 2 * numbers / stage if x["zero"] >= 3 else 0.0

    split = t if x["sequence_parallel"] else 1
    scores = 5 * x["heads"] * s / t
    whole = 10 * h / split + 24 * h / t + scores
    kept, working = [(whole, 0.0), (whole - scores, scores), (2 * h / split, whole)][int(x["recompute"])]
    held = stage * min(x["micro_batches"], x["pp"]) * s
    logits = s * (4 * h + 4 * x["vocab"]) / t if x["pp"] == 1 else 0.0
    smaller = 1 - x["coded"] + x["coded"] * _stored_bits(x) / 16
    fixed = weights + gradients + states + gathered
    plain_each = held * kept + s * working + logits
    # coded, one layer at a time is there in full
    coded_working = s * (max(working, kept) if x["coded"] > 0 else working)
    coded_each = held * kept * smaller + coded_working + logits
    room = (x["gpu_gib"] - x["reserve_gib"]) * GIB - fixed
    b = x["micro_batch"]
    return {
        "parameters_b": parameters / 1e9,
        "weights_gib": weights / GIB,
        "gradients_gib": gradients / GIB,
        "states_gib": states / GIB,
        "activations_gib": b * held * kept / GIB,
        "coded_activations_gib": b * held * kept * smaller / GIB,
        "working_gib": (b * (s * working + logits) + gathered) / GIB,
        "coded_working_gib": (b * (coded_working + logits) + gathered) / GIB,
        "total_gib": (fixed + b * plain_each) / GIB,
        "coded_total_gib": (fixed + b * coded_each) / GIB,
        "largest_batch": float(max(0, math.floor(room / plain_each))),
        "coded_largest_batch": float(max(0, math.floor(room / coded_each))),
    }


# --- 3: bits, bytes and distortion ----------------------------------------------------------------------------


def codec(case: Case, distortion: Mapping[int, float]) -> Result:
    """Stored bytes and the error on Gaussian numbers. distortion: {bits: D(bits)} of the Lloyd-Max quantizer of
    N(0, 1); it comes from `tq.quant`, which this package does not import.

    nmse: with the scale that minimises it; nmse_unbiased: D / (1 - D), with the scale that makes the mean exact.
    """
    x = _read("codec", case)
    blocks = math.ceil(x["numbers"] / x["block"])
    code_bytes = math.ceil(x["block"] * x["bits"] / 8)
    stored = blocks * (code_bytes + x["scale_bits"] / 8)
    d = distortion[int(x["bits"])]
    return {
        "bits_per_element": (code_bytes + x["scale_bits"] / 8) * 8 / x["block"],
        "bytes": stored,
        "bytes_fp32": 4 * x["numbers"],
        "bytes_bf16": 2 * x["numbers"],
        "ratio_fp32": 4 * x["numbers"] / stored,
        "ratio_bf16": 2 * x["numbers"] / stored,
        "nmse": d,
        "nmse_unbiased": d / (1 - d),
        "nmse_floor": 4.0 ** -x["bits"],
        "snr_db": -10 * math.log10(d),
    }

"""The three calculators of the book's page as closed forms: savings, memory, codec. `calculators.js` mirrors them.

Each takes a case, a mapping of every field in `FIELDS`, and returns numbers. They are deliberately simple: what they
leave out is what `tq.systems` adds. A field outside its range, missing or unknown raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tq.economics import savings as saved
from tq.economics.fields import BITS, BLOCK, SCALE, Case, Field, Result, read, stored_bits
from tq.economics.savings import savings

__all__ = ["FIELDS", "Case", "Field", "Result", "codec", "defaults", "memory", "savings"]

GIB = 2.0**30

#: The fields of each calculator: "savings", "memory" and "codec", in the order of the page. A case names all of them.
FIELDS: dict[str, tuple[Field, ...]] = {
    "savings": saved.FIELDS,
    "memory": (
        Field("layers", "Layers", 80, 1, 1e4, whole=True),
        Field("hidden", "Hidden width", 8192, 1, 1e6, whole=True),
        Field("heads", "Attention heads", 64, 1, 1e5, whole=True),
        Field("seq", "Sequence length", 4096, 1, 1e8, whole=True),
        Field("vocab", "Vocabulary", 32000, 1, 1e8, whole=True),
        Field("tp", "Tensor-parallel GPUs", 8, 1, 1e4, whole=True),
        Field("pp", "Pipeline stages", 4, 1, 1e4, whole=True),
        Field("dp", "Data-parallel replicas", 8, 1, 1e6, whole=True),
        Field("micro_batch", "Sequences per micro-batch", 1, 1, 1e5, whole=True),
        Field("micro_batches", "Micro-batches per step", 16, 1, 1e6, whole=True),
        Field("zero", "ZeRO stage", 1, 0, 3, choices=((0, "0"), (1, "1"), (2, "2"), (3, "3")), whole=True),
        Field(
            "recompute", "Recomputed in the backward pass", 1, 0, 2, whole=True,
            choices=((0, "nothing"), (1, "attention scores (or fused)"), (2, "every layer")),
        ),
        Field("sequence_parallel", "Sequence parallelism", 1, 0, 1, choices=((0, "no"), (1, "yes")), whole=True),
        Field("gradient_bytes", "Gradients", 4, 2, 4, "bytes", choices=((2, "16 bits"), (4, "32 bits")), whole=True),
        Field("gpu_gib", "Memory of a GPU", 80, 1, 1e4, "GiB"),
        Field("reserve_gib", "Kept free", 6, 0, 1e4, "GiB"),
        BITS, BLOCK, SCALE,
        Field("coded", "Share of the kept activations that is quantized", 0.9, 0, 1, "0 to 1"),
    ),
    "codec": (BITS, BLOCK, SCALE, Field("numbers", "Numbers in the tensor", 1e6, 1, 1e15, whole=True)),
}  # fmt: skip


def defaults(calculator: str) -> dict[str, float]:
    """The case that a calculator opens with.

    Args:
        calculator: "savings", "memory" or "codec".

    Returns:
        A new dict with every field of the calculator.

    Raises:
        KeyError: if there is no such calculator.

    Example:
        >>> from tq.economics.calculator import defaults
        >>> defaults("codec")
        {'bits': 4, 'block': 128, 'scale_bits': 32, 'numbers': 1000000.0}
    """
    return {field.name: field.default for field in FIELDS[calculator]}


# --- memory and the largest batch --------------------------------------------------------------------------


def memory(case: Case) -> Result:
    """Memory of the first pipeline stage in GiB, without and with quantized activations, and the largest micro-batch.

    GPT shape with an MLP of width 4 h: s b h (10 + 24 / t + 5 a s / (h t)) bytes per layer (Korthikanti et al. 2022,
    arXiv:2205.05198), the 10 over t too with sequence parallelism. 12 bytes of states per parameter, split by ZeRO.

    Args:
        case: every field of ``FIELDS["memory"]``.
    Returns:
        "total_gib" and its parts, "largest_batch" in sequences; "coded_total_gib", ... with quantized activations.
    Raises:
        ValueError: if a field is missing, unknown or out of range, or the sizes do not divide as they must.
    Example:
        >>> from tq.economics.calculator import defaults, memory
        >>> [memory(defaults("memory"))[name] for name in ("largest_batch", "coded_largest_batch")]
        [5.0, 14.0]
    """
    x = read("memory", FIELDS["memory"], case)
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
    smaller = 1 - x["coded"] + x["coded"] * stored_bits(x) / 16
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


# --- bits, bytes and distortion ----------------------------------------------------------------------------


def codec(case: Case, distortion: Mapping[int, float]) -> Result:
    """Stored bytes of a tensor, and the error of the codec on Gaussian numbers.

    Args:
        case: every field of ``FIELDS["codec"]``.
        distortion: {bits: D(bits)}, the error of the Lloyd-Max quantizer of N(0, 1); ``tq.quant.codebook.distortion``
            computes it. It is an argument because this package does not import ``tq.quant``.

    Returns:
        "bits_per_element" with scales; "bytes", "bytes_fp32" and "bytes_bf16" of the tensor; "ratio_fp32" and
        "ratio_bf16", how many times smaller it gets; "nmse", the normalised mean squared error D with the scale that
        minimises it; "nmse_unbiased", D / (1 - D) with the unbiased scale; "nmse_floor", the rate-distortion bound
        (Shannon 1959); "snr_db", of "nmse" in dB.

    Raises:
        KeyError: if ``distortion`` lacks the number of bits.
        ValueError: if a field is missing, unknown or out of range.

    Example:
        >>> from tq.economics.calculator import codec, defaults
        >>> from tq.quant.codebook import distortion
        >>> found = codec(defaults("codec"), {4: distortion(4)})
        >>> found["bits_per_element"], round(found["ratio_bf16"], 2), round(found["nmse"], 4)
        (4.25, 3.76, 0.0095)
    """
    x = read("codec", FIELDS["codec"], case)
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

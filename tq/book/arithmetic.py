"""Rules for claims that follow from arithmetic alone: stored bits, bytes a parameter, counts of GPUs and tokens.

Each row computes the claimed quantity under every reading that the claim leaves open. If all readings agree with the
claim it is "reproduced", if some do "partly", else "not reproduced". The claimed figure is read from `data/claims.csv`.
Not here: costs, whole clusters, losses, anything that a machine has to be asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tq import Codec
from tq.book.ledger import NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Facts, Finding
from tq.quant.bounds import compression_ratio
from tq.quant.formats import nf4_double_quantized
from tq.systems import Transformer

Numbers = tuple[float, ...]
ROUND, TIGHT, LOOSE = 0.10, 0.01, 0.30  # a figure given to one digit; given exactly; a round "about 100"

STORED = Codec(bits=4, block=128).bits_per_element  # 4.25: an fp32 scale a block
STORED_BF16 = Codec(bits=4, block=128, scale_dtype=torch.bfloat16).bits_per_element  # 4.125
NF4_DQ = nf4_double_quantized().bits_per_element  # 4.127
GIB = 2.0**30


def _text(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _join(parts: list[str], last: str) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


@dataclass(frozen=True)
class Sum:
    """One claim: `readings` gives, by the words that name a reading, the quantity that the claim is about."""

    formula: str
    readings: Callable[[], dict[str, float | Numbers]]
    unit: str = ""
    within: float = ROUND
    claimed: float | Numbers | None = None  # None: the first number of the claim's value
    note: str = ""
    confidence: str = "high"
    see: str = ""
    would_change: str = "A reading of the claim that is not listed, or an error in the formula."

    def _show(self, label: str, value: float | Numbers) -> str:
        numbers = value if isinstance(value, tuple) else (value,)
        unit = "×" if self.unit == "x" else f" {self.unit}" if self.unit else ""
        return f"{label} ({' and '.join(map(_text, numbers))}{unit})"

    def _agrees(self, value: float | Numbers, claimed: float | Numbers) -> bool:
        a, b = (x if isinstance(x, tuple) else (x,) for x in (value, claimed))
        return len(a) == len(b) and all(abs(x - y) <= self.within * abs(y) for x, y in zip(a, b, strict=True))

    def __call__(self, claim: Claim, facts: Facts) -> Finding:
        claimed = claim.number() if self.claimed is None else self.claimed
        found = self.readings()
        yes = [self._show(label, value) for label, value in found.items() if self._agrees(value, claimed)]
        no = [self._show(label, value) for label, value in found.items() if not self._agrees(value, claimed)]
        if yes and no:
            verdict, text = PARTLY, f"holds {_join(yes, 'and')}; not {_join(no, 'or')}"
        elif yes:
            verdict, text = REPRODUCED, f"holds {_join(yes, 'and')}"
        else:
            verdict, text = NOT_REPRODUCED, f"it comes out otherwise {_join(no, 'and')}"
        text += f". {self.note}" if self.note else ""
        formula = f"{self.formula}; agreement within {self.within:.0%}"
        return Finding(verdict, text, self.would_change, self.confidence, formula, self.see)


def _ratios() -> dict[str, float | Numbers]:
    stored = {"one scale a tensor": 4.0, "bf16 scales": STORED_BF16, "fp32 scales": STORED}
    bases = {"fp32": 32.0, "bf16": 16.0}
    every = [(base, scales) for base in bases for scales in stored]
    return {f"against {b} with {s}": compression_ratio(stored[s], bases[b]) for b, s in every}


def _against_bf16() -> dict[str, float | Numbers]:
    return {label: value for label, value in _ratios().items() if "bf16 with" in label}


def _effective(rate: float) -> Callable[[], dict[str, float | Numbers]]:
    """A link of `rate` Gbit/s, as fast as an uncoded one would have to be."""
    return lambda: {
        "for an fp32 payload before scales": rate * 32 / 4,
        "for an fp32 payload with scales": rate * compression_ratio(STORED),
        "for a bf16 payload with scales": rate * compression_ratio(STORED, 16),
    }


def _gathered(n: int) -> float:
    """Bytes of an fp32 ring all-reduce over those of an all-gather of codes: 2 (n-1)/n 32 over (n-1) b."""
    return 2 * 32 / (n * STORED)


def _lora_405b(rank: int) -> float:
    """Millions of adapter parameters on q, k, v and o of Llama 3.1 405B (126 layers, width 16,384, k and v 1,024)."""
    return 126 * rank * (2 * (16384 + 16384) + 2 * (16384 + 1024)) / 1e6


def _bytes(parameters: float, **each: float) -> Callable[[], dict[str, float | Numbers]]:
    """Gigabytes of so many parameters at the bits that each reading stores; `_` in a name reads as a blank."""
    return lambda: {name.replace("_", " "): parameters * bits / 8 / 1e9 for name, bits in each.items()}


def _mixtral() -> dict[str, float | Numbers]:
    shape = Transformer.preset("mixtral-8x7b")
    return {"for the published shape": (shape.active_parameters / 1e9, shape.parameters / 1e9)}


_LEGS = {"one way": 1, "for an all-reduce": 2}
_PAYLOAD = "Payload alone: latency, and what a collective sends how often, are other questions."
_WIRE = "Bytes counted on a real link instead of stored bits, or scales accounted for in another way."
_WEIGHTS = "Weights alone: no optimizer, activations or cache."
_SHOWN = "distortion"  # the chapter that counts stored bits
_LINK = "rate * base bits / (4 + 32/128)"

SUMS: dict[str, Sum] = {
    # --- what four bits are worth -----------------------------------------------------------------------------
    "S0-001": Sum(
        "base bits / (4 + scale bits a number)", _ratios, "x", note=_PAYLOAD, confidence="medium", would_change=_WIRE,
        see=_SHOWN,
    ),
    "S0-002": Sum(
        "16 / (4 + scale bits / 128), and 1 / (1 - c + c / that) when a share c of the kept bytes can be coded",
        lambda: _against_bf16() | {
            "for a step of which 90 % can be coded": 1 / (0.1 + 0.9 / compression_ratio(STORED, 16))
        },
        "x", note="A ratio of bytes; no peak memory is measured yet.", confidence="medium",
        would_change="Peak memory of a step with and without coding, which no chapter has measured yet.", see=_SHOWN,
    ),
    "S0-034": Sum(_LINK, _effective(400), "Gbit/s", note=_PAYLOAD, would_change=_WIRE),
    "S0-035": Sum(_LINK, _effective(100), "Gbit/s", note=_PAYLOAD, would_change=_WIRE),
    "S0-037": Sum(_LINK, _effective(25), "Gbit/s", note=_PAYLOAD, would_change=_WIRE),
    "S0-038": Sum(
        _LINK + "; InfiniBand HDR has 200 Gbit/s", _effective(25), "Gbit/s", note=_PAYLOAD, would_change=_WIRE
    ),
    "S0-036": Sum(
        "effective rate of 100G over that of 400G",
        lambda: {
            "when only the Ethernet side codes an fp32 payload": 100 * compression_ratio(STORED) / 400,
            "when only the Ethernet side codes a bf16 payload": 100 * compression_ratio(STORED, 16) / 400,
            "when both sides code": 100 / 400,
        },
        "x", note=_PAYLOAD, would_change=_WIRE,
    ),
    "T-011": Sum(
        "fp32 ring, 2 (n-1)/n * 32 bits, over an all-gather of codes, (n-1) * 4.25 bits: 64 / (4.25 n)",
        lambda: {f"with {n} workers": _gathered(n) for n in (2, 4, 8, 16)},
        "x", note="An all-gather grows with n; a reduce-scatter of codes would not.", would_change=_WIRE,
    ),
    "T-014": Sum(
        "32 / (4 + scale bits / 128)",
        lambda: {label: value for label, value in _ratios().items() if "fp32 with" in label},
        "x", TIGHT, note="Two digits are claimed, so the scales count.", would_change=_WIRE, see=_SHOWN,
    ),
    "S4-074": Sum(
        "16 / (4 + scale bits / 128)", _against_bf16, "x", would_change="Another layout of scales.", see=_SHOWN
    ),
    # --- bytes of models --------------------------------------------------------------------------------------
    "S4-005": Sum("405e9 * 2 bytes", _bytes(405e9, in_bf16=16), "GB", TIGHT, note=_WEIGHTS),
    "S4-006": Sum(
        "405e9 * bits / 8", lambda: _bytes(405e9, for_the_codes_alone=4)() | {
            "as NF4 with double quantization": 405 * NF4_DQ / 8, "with fp32 scales every 128": 405 * STORED / 8
        }, "GB", note=_WEIGHTS,
    ),
    "S4-027": Sum("1.5e9 * 4 bytes", _bytes(1.5e9, in_fp32=32), "GB", TIGHT, note=_WEIGHTS),
    "S4-045": Sum("500e9 * 2 bytes", lambda: {"in bf16": 500e9 * 2 / 1e12}, "TB", TIGHT, note=_WEIGHTS),
    "S4-008": Sum("8 * 80", lambda: {"for eight cards of 80 GB": 8 * 80.0}, "GB", TIGHT),
    "S4-009": Sum(
        "8 * 24", lambda: {"for eight cards of 24 GB": 8 * 24.0}, "GB", TIGHT,
        note=f"A 7B model's states take {7 * 16} GB at 16 bytes a parameter, before activations.",
    ),
    "S4-055": Sum(
        "2 (bf16 weight) + 2 (bf16 gradient) + 4 + 4 (fp32 moments)",
        lambda: {"as the sum of the parts": 2.0 + 2 + 4 + 4},
        "bytes a parameter", TIGHT, claimed=2.0 + 2 + 8, note="Without an fp32 master copy of the weights.",
    ),
    "S4-056": Sum(
        "12, + 4 for an fp32 master copy, + 4 for fp32 gradients",
        lambda: {
            "for the listed parts": (12.0, 12.0), "with a master copy, and fp32 gradients besides": (16.0, 20.0)
        },
        "bytes a parameter", TIGHT, claimed=(16.0, 20.0),
    ),
    "S4-057": Sum(
        "70e9 * bytes a parameter", lambda: {f"at {b} bytes a parameter": 70e9 * b / 1e12 for b in (20, 16, 12)},
        "TB", 0.05,
    ),
    "S4-066": Sum("4 + 4 (fp32 moments)", lambda: {"for two fp32 moments of a parameter": 4.0 + 4}, "bytes", TIGHT),
    "S3-050": Sum(
        "fp32: 4 + 4 + 8 bytes; mixed: 2 + 2 + 4 (master) + 8",
        lambda: {"for activations": 32 / 16, "for weights, gradients and optimizer": (4 + 4 + 8) / (2 + 2 + 4 + 8)},
        "x", TIGHT, would_change="Training without a master copy of the weights.",
    ),
    "S3-055": Sum(
        "50 MB of cache (S3-041) * 8 / bits",
        lambda: {"in bf16": 50e6 / 2 / 1e9, "at 4 bits with scales": 50e6 * 8 / STORED / 1e9},
        "billion parameters", note="That is what fits.", would_change="A GPU with a cache of half a gigabyte.",
    ),
    # --- the memory of a GPU ----------------------------------------------------------------------------------
    "S3-038": Sum(
        "lanes * operands * 4 bytes * 1.755 GHz: an H100 has 132 multiprocessors of 128 lanes",
        lambda: {
            "for one multiprocessor that reads two operands": 128 * 2 * 4 * 1.755e9 / 1e12,
            "for one that reads three": 128 * 3 * 4 * 1.755e9 / 1e12,
            "for the whole GPU": 132 * 128 * 3 * 4 * 1.755e9 / 1e12,
        }, "TB/s", note="The claim does not say of what.",
    ),
    "S3-040": Sum(
        "multiprocessors * 128 bytes a clock",
        lambda: {
            "for an A100 (108 at 1.41 GHz)": 108 * 128 * 1.41e9 / 1e12,
            "for the H100 that it is about (132 at 1.755 GHz)": 132 * 128 * 1.755e9 / 1e12,
        }, "TB/s",
    ),
    "S3-044": Sum(
        "channels * 8 bytes * transfers a second",
        lambda: {
            "for eight channels of DDR4-3200": 8 * 8 * 3.2, "for eight of DDR5-4800": 8 * 8 * 4.8,
            "for twelve of DDR5-4800": 12 * 8 * 4.8, "as a GPU sees it through PCIe 5.0 (data/sources.csv)": 64.0,
        }, "GB/s", would_change="The machine that is meant.", confidence="medium",
    ),
    # --- checkpoints ------------------------------------------------------------------------------------------
    "S2-001": Sum(
        "70e9 * bytes a parameter",
        lambda: {
            "in GiB at 12 bytes a parameter": 70e9 * 12 / GIB, "in GB at 12": 70.0 * 12,
            "in GiB with an fp32 master copy": 70e9 * 16 / GIB,
        }, within=TIGHT,
    ),
    "S2-002": Sum("70e9 * 8 bytes", lambda: {"in GiB": 70e9 * 8 / GIB, "in GB": 70.0 * 8}, within=TIGHT),
    "S2-003": Sum("8 bytes of moments / 2 bytes of weight", lambda: {"for bf16 weights": 8 / 2}, "x", TIGHT),
    "S2-004": Sum(
        "1,440 checkpoints a month * 70e9 * 12 bytes",
        lambda: {
            "if GiB are counted as GB": 1440 * 70e9 * 12 / GIB / 1e6, "in PB": 1440 * 70e9 * 12 / 1e15,
            "in PiB": 1440 * 70e9 * 12 / 2.0**50,
        }, within=TIGHT,
    ),
    "S2-013": Sum(
        "8 / bytes a parameter", lambda: {"at 12 bytes a parameter": 800 / 12, "with an fp32 master copy": 800 / 16},
        "%", TIGHT,
    ),
    # --- counts -----------------------------------------------------------------------------------------------
    "S3-017": Sum(
        "ceil(log2 n) against n - 1, each twice for an all-reduce",
        lambda: {label: (k * float(math.ceil(math.log2(1e4))), k * 9999.0) for label, k in _LEGS.items()},
        "steps", TIGHT, claimed=(14.0, 10000.0),
        note="Steps decide latency only: tree and ring move the same bytes.",
    ),
    "S4-007": Sum(
        "126 layers * r * (d_in + d_out) over q, k, v, o",
        lambda: {f"at rank {r}": _lora_405b(r) for r in (8, 16, 64)}, "million",
        would_change="Adapters on other matrices than the four of attention.", confidence="medium",
    ),
    "S3-067": Sum(
        "parameters of 32 layers of width 4,096 with 8 experts of 14,336, and of the 2 that a token visits", _mixtral,
        "billion", TIGHT, claimed=(12.9, 47.0),
    ),
    "S4-012": Sum(
        "log10 of a quotient of 25,000 GPUs for 100 days (read as 1e26 operations), hours on 8 GPUs, and 7B "
        "parameters with 100 billion tokens on 8 cards",
        lambda: {
            "in GPU-hours, if the second instance takes three hours": math.log10(25_000 * 2400 / (8 * 3)),
            "in GPU-hours, if it takes a day": math.log10(25_000 * 2400 / (8 * 24)),
            "in operations, between the first and the third": math.log10(1e26 / (6 * 7e9 * 1e11)),
            "in GPUs": math.log10(25_000 / 8),
        }, "orders", note="The document's own exponents are lost.", confidence="medium",
    ),
    "S4-050": Sum("8 * 16 * 16", lambda: {"as the product of the three degrees": 8.0 * 16 * 16}, "GPUs", TIGHT),
    "S4-051": Sum(
        "floor(25,000 / 2,048)", lambda: {"in whole replicas": float(25000 // 2048)}, "replicas", TIGHT,
        note=f"{25000 % 2048} GPUs stay idle.",
    ),
    "S4-065": Sum(
        "E4M3 reaches 448 and E5M2 57,344",
        lambda: {
            "for the two float8 types of PyTorch": float(
                sum(torch.finfo(d).max == m for d, m in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)))
            )
        }, "formats", TIGHT,
    ),
    "S4-070": Sum(
        "r (d + k) and d k for d = k = 4,096 and r = 16", lambda: {"at rank 16": (16.0 * (4096 + 4096), 4096.0 * 4096)},
        "parameters", 0.05, claimed=(130e3, 17e6), note="The document lost d, k and r; 4,096 and 16 give its figures.",
    ),
    "S4-071": Sum("d k / (r (d + k))", lambda: {"at rank 16": 4096 * 4096 / (16 * 8192)}, "x", LOOSE),
    "S4-078": Sum("20 * 70e9", lambda: {"for 70B parameters": 20 * 70e9 / 1e12}, "trillion tokens", TIGHT, claimed=1.4),
    "S4-079": Sum("15e12 * 4 bytes", lambda: {"at 4 bytes a token": 15e12 * 4 / 1e12}, "TB", TIGHT),
}  # fmt: skip

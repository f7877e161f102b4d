"""Rules that are formulas: the claimed quantity under every reading that a claim leaves open.

If all readings agree with the claim it is "reproduced", if some do "partly", else "not reproduced". The claimed figure
is read from `data/claims.csv`, unless a rule says how its words are read. Physics stands in `tq.systems`, the law of
stored bits in `tq.quant`; the formulas of a chapter in its file of rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch

from tq.book.claims.ledger import Claim, Finding, Results, verdict_for
from tq.quant.bounds import compression_ratio
from tq.quant.codec import Codec
from tq.quant.formats import nf4_double_quantized

Numbers = tuple[float, ...]
Figure = float | Numbers
Readings = Callable[[], dict[str, Figure]]
ROUND, TIGHT, LOOSE = 0.10, 0.01, 0.30  # a figure given to one digit; given exactly; a round "about 100"
SAME = 0.01  # nats that two runs of one seed may differ by and still count as the same
FAILS = 0.1  # nats above the baseline at the end of a short run that count as a failure

STORED = Codec(bits=4, block=128).bits_per_element  # 4.25: an fp32 scale a block
STORED_BF16 = Codec(bits=4, block=128, scale_dtype=torch.bfloat16).bits_per_element  # 4.125
NF4_DQ = nf4_double_quantized().bits_per_element  # 4.127
GIB = 2.0**30

PAYLOAD = "Payload alone: latency, and what a collective sends how often, are other questions."
WIRE = "Bytes counted on a real link instead of stored bits, or scales accounted for in another way."
WEIGHTS_ALONE = "Weights alone: no optimizer, activations or cache."


def at_least(claim: Claim) -> Numbers:
    """The first number of the claim, or more."""
    return claim.number(), math.inf


def _text(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _join(parts: list[str], last: str) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


@dataclass(frozen=True)
class Formula:
    """One claim: `readings` gives, by the words that name a reading, the quantity that the claim is about. A reading
    agrees if each of its numbers is `within` that share of the claimed one."""

    formula: str
    readings: Readings
    unit: str = ""
    within: float = ROUND
    _: KW_ONLY
    claimed: Figure | Callable[[Claim], Figure] = Claim.number
    note: str = ""
    confidence: str = "high"
    see: str = ""
    would_change: str = "A reading of the claim that is not listed, or an error in the formula."

    def figure(self, claim: Claim) -> Figure:
        """What is claimed."""
        return self.claimed(claim) if callable(self.claimed) else self.claimed

    def _show(self, label: str, value: Figure) -> str:
        numbers = value if isinstance(value, tuple) else (value,)
        unit = "×" if self.unit == "x" else f" {self.unit}" if self.unit else ""
        return f"{label} ({' and '.join(map(_text, numbers))}{unit})"

    def agrees(self, value: Figure, claimed: Figure) -> bool:
        """Whether a reading of this value agrees."""
        a, b = (x if isinstance(x, tuple) else (x,) for x in (value, claimed))
        return len(a) == len(b) and all(abs(x - y) <= self.within * abs(y) for x, y in zip(a, b, strict=True))

    def __call__(self, claim: Claim, results: Results) -> Finding:
        claimed = self.figure(claim)
        shown: dict[bool, list[str]] = {True: [], False: []}
        for label, value in self.readings().items():
            shown[self.agrees(value, claimed)].append(self._show(label, value))
        yes, no = shown[True], shown[False]
        if yes:
            text = f"holds {_join(yes, 'and')}" + (f"; not {_join(no, 'or')}" if no else "")
        else:
            text = f"it comes out otherwise {_join(no, 'and')}"
        text += f". {self.note}" if self.note else ""
        formula = f"{self.formula}; agreement within {self.within:.0%}"
        verdict = verdict_for(not no, bool(yes))
        return Finding(verdict, text, self.would_change, self.confidence, formula, self.see)


@dataclass(frozen=True)
class RangeFormula(Formula):
    """A claim of a range or of a bound: a reading agrees between the two ends of `claimed`, `within` wider."""

    _: KW_ONLY
    claimed: Figure | Callable[[Claim], Figure] = Claim.ends

    def agrees(self, value: Figure, claimed: Figure) -> bool:
        """Whether a reading of this value lies in the range."""
        assert isinstance(claimed, tuple) and not isinstance(value, tuple)
        return claimed[0] * (1 - self.within) <= value <= claimed[1] * (1 + self.within)


def ratios(*bases: str) -> dict[str, Figure]:
    """What four bits with different scales save against the bases "fp32" and "bf16"."""
    stored = {"one scale a tensor": 4.0, "bf16 scales": STORED_BF16, "fp32 scales": STORED}
    bits = {"fp32": 32.0, "bf16": 16.0}
    return {f"against {b} with {s}": compression_ratio(stored[s], bits[b]) for b in bases for s in stored}


def gigabytes(parameters: float, **each: float) -> Readings:
    """Of so many parameters at the bits that each reading stores; `_` in a name reads as a blank."""
    return lambda: {name.replace("_", " "): parameters * bits / 8 / 1e9 for name, bits in each.items()}

"""Rules that are formulas: the claimed quantity under every reading that a document names.

A reading is named by the document or by a convention that the rule cites, and it votes. What is merely possible is a
condition: it is shown and decides nothing. A parameter that a document leaves free gets the set in which its claim
holds (`Free`). The claimed figure is read from `data/claims.csv`, how near it must come follows from how it is written
(`tq.book.claims.tolerance`), and what the readings add up to from the claim's quantifier (`tq.book.claims.words`).
Physics stands in `tq.systems`, the law of stored bits in `tq.quant`; the formulas of a chapter in its file of rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch

from tq.book.claims import words
from tq.book.claims.ledger import Claim, Finding, Results, found
from tq.book.claims.words import Check, shown
from tq.quant.bounds import compression_ratio
from tq.quant.codec import Codec
from tq.quant.formats import nf4_double_quantized

Numbers = tuple[float, ...]
Figure = float | Numbers
Readings = Callable[[], dict[str, Figure]]
FAILS = 0.1  # nats above the baseline at the end of a short run that count as a failure

STORED = Codec(bits=4, block=128).bits_per_element  # 4.25: an fp32 scale a block
STORED_BF16 = Codec(bits=4, block=128, scale_dtype=torch.bfloat16).bits_per_element  # 4.125
NF4_DQ = nf4_double_quantized().bits_per_element  # 4.127
GIB = 2.0**30
OPEN = 1e9  # an upper end from which on a range counts as open


def _nothing() -> dict[str, Figure]:
    return {}


def _numbers(value: Figure) -> Numbers:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class Formula:
    """One claim of a figure.

    formula: as the ledger shows it. readings: by the words that name each, the quantity that the claim is about.
    says: the reason, at most 40 words, in which ``{0}`` is the first of all values. would_change: of this claim alone.
    conditions: like readings, but they decide nothing. claimed: what is claimed, where the table's value is not it.
    within: by how much a reading may be off, where ``claimed`` is no figure of the table.
    """

    formula: str
    readings: Readings = _nothing
    says: str = ""
    would_change: str = ""
    unit: str = ""
    _: KW_ONLY
    conditions: Readings = _nothing
    claimed: Figure | Callable[[Claim], Figure] = Claim.number
    within: float | None = None
    confidence: str = "high"
    see: str = ""
    basis: str = ""

    def figure(self, claim: Claim) -> Figure:
        """What is claimed."""
        return self.claimed(claim) if callable(self.claimed) else self.claimed

    def tolerance(self, claim: Claim) -> float:
        """Share that a reading may be off by."""
        return max(claim.within()) if self.within is None else self.within

    def bounds(self, claim: Claim) -> tuple[float, float]:
        """The ends of what is claimed, each wider by its tolerance; a bound has no other end."""
        ends = _numbers(self.figure(claim))
        below, above = claim.within() if self.within is None else (self.within, self.within)
        least = -math.inf if claim.quantifier == words.AT_MOST else ends[0] * (1 - below)
        return least, math.inf if claim.quantifier == words.AT_LEAST else ends[-1] * (1 + above)

    def rule(self, claim: Claim) -> str:
        """The rule in words, with its tolerance."""
        off, many = self.tolerance(claim), len(self.readings())
        bound = {words.AT_LEAST: "reach", words.AT_MOST: "not exceed"}.get(claim.quantifier)
        if bound is not None:
            near = f"{bound} the claimed figure" + (f", with {off:.0%} of tolerance" if off else "")
        else:
            near = self._near(claim)
        who = (
            "It" if many == 1 else f"At least one of {many} readings" if claim.quantifier == words.EXISTS
            else f"Each of {many} readings"
        )  # fmt: skip
        return f"Computed: {self.formula}. {who} must {near}."

    def _near(self, claim: Claim) -> str:
        """What a reading of a claim that is no bound must do."""
        off = self.tolerance(claim)
        return f"come within {off:.0%} of the claimed figure" if off else "equal the claimed figure"

    def agrees(self, value: Figure, claim: Claim) -> bool:
        """Whether a reading of this value agrees."""
        pairs, off = (_numbers(value), _numbers(self.figure(claim))), self.tolerance(claim)
        if len(pairs[0]) != len(pairs[1]):
            return False
        if claim.quantifier == words.AT_LEAST:
            return all(x >= y * (1 - off) for x, y in zip(*pairs, strict=True))
        if claim.quantifier == words.AT_MOST:
            return all(x <= y * (1 + off) for x, y in zip(*pairs, strict=True))
        return all(abs(x - y) <= off * abs(y) for x, y in zip(*pairs, strict=True))

    def _text(self, label: str, value: Figure) -> str:
        unit = "×" if self.unit == "x" else f" {self.unit}" if self.unit else ""
        return f"{label} {' and '.join(map(shown, _numbers(value)))}{unit}".strip()

    def __call__(self, claim: Claim, results: Results) -> Finding:
        readings, conditions = self.readings(), self.conditions()
        checks = [Check(self._text(label, value), self.agrees(value, claim)) for label, value in readings.items()]
        values = [_numbers(value)[0] for value in (*readings.values(), *conditions.values())]
        shown_too = [self._text(label, value) for label, value in conditions.items()]
        evidence = "; ".join([f"{self.formula}: {', '.join(c.text for c in checks)}", *shown_too])
        return found(
            claim, checks, self.says.format(*values), self.would_change, self.confidence, evidence, see=self.see,
            basis=self.basis,
        )  # fmt: skip


@dataclass(frozen=True)
class RangeFormula(Formula):
    """A claim of a range: a reading agrees between its two ends, each wider by its tolerance; of a bound on one side.

    A quantity with a range of its own, as (low, high), agrees where all of it lies inside, and with a claim that
    something exists where any of it does.
    """

    _: KW_ONLY
    claimed: Figure | Callable[[Claim], Figure] = Claim.ends

    def _near(self, claim: Claim) -> str:
        least, most = self.bounds(claim)
        return f"be at least {shown(least)}" if most >= OPEN else f"lie between {shown(least)} and {shown(most)}"

    def agrees(self, value: Figure, claim: Claim) -> bool:
        """Whether a reading of this value, or range, lies in the claimed one."""
        (least, most), ends = self.bounds(claim), _numbers(value)
        if claim.quantifier == words.EXISTS:
            return ends[0] <= most and least <= ends[-1]
        return all(least <= end <= most for end in ends)


@dataclass(frozen=True)
class Free(Formula):
    """A claim whose quantity hangs on a parameter that its document leaves open: the set in which it holds is shown.

    of: the quantity as a function of the parameter. over: the parameter's ends, as practice has them, and `usual`, its
    value in the case that the book takes for usual; ``{low}`` and ``{high}`` in `says` are the ends of the set. A claim
    that something exists holds if the set is not empty; any other holds at the usual value, in part elsewhere.
    """

    _: KW_ONLY
    of: Callable[[float], float] = float
    over: tuple[float, float] = (1.0, 1.0)
    usual: float = 1.0
    name: str = ""
    claimed: Figure | Callable[[Claim], Figure] = Claim.ends

    def holds(self, parameter: float, claim: Claim) -> bool:
        """Whether the claim holds at this value of the parameter."""
        least, most = self.bounds(claim)
        return least <= self.of(parameter) <= most

    def where(self, claim: Claim) -> tuple[float, float] | None:
        """The least and the largest value of the parameter at which the claim holds; None if there is none."""
        low, high = map(math.log, self.over)
        steps = [math.exp(low + (high - low) * i / 2000) for i in range(2001)]
        good = [parameter for parameter in steps if self.holds(parameter, claim)]
        return (good[0], good[-1]) if good else None

    def rule(self, claim: Claim) -> str:
        """The rule in words, with its tolerance."""
        over = f"{self.name} from {shown(self.over[0])} to {shown(self.over[1])}"
        wanted = "somewhere in this range" if claim.quantifier == words.EXISTS else (
            f"at {shown(self.usual)}; elsewhere it counts in part"
        )  # fmt: skip
        return f"Computed: {self.formula}, for {over}. It must {self._near(claim)} {wanted}."

    def _near(self, claim: Claim) -> str:
        least, most = self.bounds(claim)
        return f"lie between {shown(least)} and {shown(most)}" if math.isfinite(most) else f"be at least {shown(least)}"

    def __call__(self, claim: Claim, results: Results) -> Finding:
        inside = self.where(claim)
        low, high = inside or (math.nan, math.nan)
        where = f"{shown(low)} to {shown(high)}" if inside else "none"
        alone = claim.quantifier == words.EXISTS
        somewhere = Check(f"{self.name} with this figure: {where}", inside is not None, part=not alone)
        at = Check(f"{shown(self.of(self.usual))} at {shown(self.usual)}", self.holds(self.usual, claim))
        checks = [somewhere] if alone else [at, somewhere]
        beside = [_numbers(value)[0] for value in self.conditions().values()]
        says = self.says.format(self.of(self.usual), *beside, low=low, high=high)
        evidence = f"{self.formula}: {', '.join(check.text for check in checks)}"
        return found(claim, checks, says, self.would_change, self.confidence, evidence, see=self.see, basis=self.basis)


def ratios(*bases: str) -> dict[str, Figure]:
    """What four bits with different scales save against the bases "fp32" and "bf16"."""
    stored = {"bf16 scales": STORED_BF16, "fp32 scales": STORED}
    bits = {"fp32": 32.0, "bf16": 16.0}
    return {f"against {b} with {s}": compression_ratio(stored[s], bits[b]) for b in bases for s in stored}


def gigabytes(parameters: float, **each: float) -> Readings:
    """Of so many parameters at the bits that each reading stores; `_` in a name reads as a blank."""
    return lambda: {name.replace("_", " "): parameters * bits / 8 / 1e9 for name, bits in each.items()}

"""What a verdict can be, and how comparisons add up to one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

REPRODUCED, PARTLY, NOT_REPRODUCED = "reproduced", "partly", "not reproduced"
UNDECIDED, LIMIT = "undecided", "stated limit"
NOT_CHECKABLE, NOT_MEASURED, NOT_YET = "not checkable", "not measured", "not yet"
NOTE = "note"  # of a row that no document claims; it is counted nowhere
DECIDED = (REPRODUCED, PARTLY, NOT_REPRODUCED)
VERDICTS = (*DECIDED, UNDECIDED, LIMIT, NOT_CHECKABLE, NOT_MEASURED, NOT_YET)

MEANINGS = {
    REPRODUCED: "comes out, under every reading that the document names",
    PARTLY: "comes out under some of the readings that the document names, or a part of the sentence does",
    NOT_REPRODUCED: "comes out under none",
    UNDECIDED: "was measured or computed, and what is known reaches to both sides of the margin",
    LIMIT: "is a limit that its authors state themselves; the reason says whether it stands or is lifted here",
    NOT_CHECKABLE: "is a forecast, a plan or without any source: nothing that could be run would decide it",
    NOT_MEASURED: "is what a chapter measures, but no full run that can decide it is recorded",
    NOT_YET: "waits for a chapter that is not written, or that does not decide it so far",
}

EXISTS, TYPICAL, ALL, AT_LEAST, AT_MOST = QUANTIFIERS = ("exists", "typical", "all", "at least", "at most")


@dataclass(frozen=True)
class Check:
    """One comparison of a rule. part: alone it makes a claim hold in part only."""

    text: str
    holds: bool
    part: bool = False

    def line(self) -> str:
        """As the derivation prints it."""
        return f"{self.text}: {'holds' if self.holds else 'does not hold'}{' (counts in part)' if self.part else ''}"


def vote(quantifier: str, checks: Sequence[Check]) -> str:
    """The verdict that comparisons add up to.

    Of a claim that something exists, one comparison that holds is enough; of every other all must hold, and some make
    it hold in part.
    """
    whole = [check.holds for check in checks if not check.part]
    if not whole:
        raise ValueError("checks holds no comparison that the claim stands or falls with")
    if any(whole) if quantifier == EXISTS else all(whole):
        return REPRODUCED
    return PARTLY if any(check.holds for check in checks) else NOT_REPRODUCED


def shown(value: float) -> str:
    """A number as the ledger prints it: three digits, whole where it is, thousands with commas."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def compare(what: str, value: float, least: float = -math.inf, most: float = math.inf, unit: str = "") -> Check:
    """Whether a value lies between two bounds, ends included, with both in its text."""
    end = f" {unit}" if unit else ""
    wanted = (
        f"{shown(least)} to {shown(most)}" if math.isfinite(least) and math.isfinite(most)
        else f"at most {shown(most)}" if math.isfinite(most) else f"at least {shown(least)}"
    )  # fmt: skip
    return Check(f"{what}: {shown(value)}{end} (required: {wanted})", least <= value <= most)


def in_part(check: Check) -> Check:
    """The same comparison, which makes a claim hold in part only."""
    return Check(check.text, check.holds, True)

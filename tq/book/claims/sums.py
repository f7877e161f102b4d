"""Sums of money in rules: how they are said, and when two ranges of them meet."""

from __future__ import annotations

import math

from tq.book.claims.ledger import Claim
from tq.book.claims.words import Check, shown

Ends = tuple[float, float]


def meet(what: str, a: Ends, b: Ends, unit: str = "") -> Check:
    """Whether two ranges overlap, which makes a claim hold in part."""
    wanted = f"{shown(b[0])} to {shown(b[1])}" if math.isfinite(b[1]) else f"at least {shown(b[0])}"
    text = f"{what} {shown(a[0])} to {shown(a[1])}{f' {unit}' if unit else ''}, must overlap {wanted}"
    return Check(text, a[0] <= b[1] and b[0] <= a[1], True)


def dollars(value: float) -> str:
    """Dollars as one says them."""
    return f"${value / 1e6:,.3g}M" if value >= 1e6 else f"${value / 1e3:,.3g}K"


def printed(claim: Claim) -> Ends:
    """Its bounds; a plus sign behind a range does not open it, or nothing could be too dear."""
    (least, most), (low, high) = claim.bounds(), claim.ends()
    return least, high * (1 + claim.within()[1]) if math.isinf(most) and low < high else most

"""Sums of money in rules: how they are said, of which months prices are, and when two ranges meet."""

from __future__ import annotations

import datetime
import math

from tq.book.claims.ledger import Claim, table
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


def two_digits(value: float) -> str:
    """With the two digits that an estimate has."""
    return f"{float(f'{value:.2g}'):,.0f}"


def snapshot() -> str:
    """The months in which the offers of `data/prices.csv` were read down."""
    days = sorted(row["date"] for row in table("prices.csv"))
    if not days:
        return "a later month"
    first, last = (datetime.date.fromisoformat(day) for day in (days[0], days[-1]))
    until = f"{last:%B %Y}"
    since = "" if f"{first:%B %Y}" == until else f"{first:%B} to " if first.year == last.year else f"{first:%B %Y} to "
    return f"{since}{until}"


def printed(claim: Claim) -> Ends:
    """Its bounds; a plus sign behind a range does not open it, or nothing could be too dear."""
    (least, most), (low, high) = claim.bounds(), claim.ends()
    return least, high * (1 + claim.within()[1]) if math.isinf(most) and low < high else most

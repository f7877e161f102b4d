"""The whitepaper's own summary, row by row, beside what the verdicts on the claims under it add up to.

Which claims stand under a row is chosen here, by hand; the word beside it is computed, so that it moves with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tq.book.claims.ledger import DECIDED, NOT_CHECKABLE, NOT_REPRODUCED, REPRODUCED

HOLDS, IN_PART, DOES_NOT_HOLD, OPEN, CANNOT = (
    "holds", "holds in part", "does not hold", "open", "cannot be checked",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of the whitepaper: its words, and the claims that it rests on."""

    name: str
    claimed: str
    claims: tuple[str, ...]


def _row(name: str, claimed: str, claims: str) -> Row:
    return Row(name, claimed, tuple(claims.split()))


TABLES: dict[str, tuple[Row, ...]] = {
    # its five-row assessment
    "dimensions": (
        _row(
            "Technical viability", "validated: 355M, 1,500 steps, loss gap below 0.003",
            "S0-063 S0-064 S0-003 S0-012 S0-002",
        ),
        _row("Business impact", "high: multi-million dollar savings", "S0-007 S0-008 S0-016 S0-052 S0-053 S0-054"),
        _row("Time to market", "3–6 months: kernels and a validation at 7B", "S0-065 S0-060 S0-056"),
        _row("Market timing", "aligned with the transition to Ethernet", "S0-040 S0-015 S0-006"),
        _row("Competitive position", "differentiated: unique dual-axis compression", "S0-011 S0-050 S0-051"),
    ),
    # its five effects
    "effects": (
        _row(
            "Infrastructure", "$8M less for 1,000 GPUs, Ethernet in place of InfiniBand", "S0-004 S0-005 S0-006 S0-016"
        ),
        _row("Training cost", "27–56 % less, $240K–500K for a 70B run", "S0-007 S0-008 S0-018 S0-019"),
        _row("Batches", "2–3 times larger on the same hardware", "S0-009 S0-045 S0-047 S0-046"),
        _row("GPUs", "half of them for 70B, by less tensor parallelism", "S0-010 S0-048 S0-049"),
        _row("Architectures", "several data centres, hybrid clouds, edge", "S0-041 S0-042"),
    ),
}  # fmt: skip


def word(verdicts: list[str]) -> str:
    """What verdicts add up to: "holds" if every decided one is reproduced, "does not hold" if every one is not, else
    "holds in part". Where more claims wait than are decided it is "open", where more cannot be checked, "cannot be
    checked": a row is not judged by its smallest part."""
    if not verdicts:
        raise ValueError("verdicts is empty: a row needs at least one claim")
    decided = [verdict for verdict in verdicts if verdict in DECIDED]
    never = sum(verdict == NOT_CHECKABLE for verdict in verdicts)
    waiting = len(verdicts) - len(decided) - never
    if len(decided) < max(waiting, never):
        return OPEN if waiting >= never else CANNOT
    if set(decided) == {REPRODUCED}:
        return HOLDS
    return DOES_NOT_HOLD if set(decided) == {NOT_REPRODUCED} else IN_PART


def assess(table: str, verdicts: Mapping[str, str]) -> list[tuple[Row, str, int]]:
    """(row, word, how many of its claims are not decided) of one table. verdicts: claim -> verdict."""
    if table not in TABLES:
        raise ValueError(f"table={table!r}: accepted are {', '.join(TABLES)}")
    found = []
    for row in TABLES[table]:
        given = [verdicts[name] for name in row.claims]
        found.append((row, word(given), sum(verdict not in DECIDED for verdict in given)))
    return found

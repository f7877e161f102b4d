"""Claims whose check is a source and that no rule decides: what `data/sources.csv` and `data/references.csv` hold.

One rule for all of them: every look-up that confirms a claim, contradicts it or does so in part counts once, whatever
we think of the source; its address and how it was read become the evidence. Nothing is read at import.
"""

from __future__ import annotations

from collections.abc import Sequence

from tq.book.claims.ledger import (
    NOT_CHECKABLE,
    NOT_REPRODUCED,
    PARTLY,
    PRINTED,
    REPRODUCED,
    Claim,
    Finding,
    table,
)
from tq.book.claims.words import Check

Row = dict[str, str]
READ = "read in source"
RULE = "all look-ups agree with the claim, or all contradict it; in part if some do"
VERDICTS = {
    "confirms": REPRODUCED, "partly": PARTLY, "differs": NOT_REPRODUCED, "not found": NOT_CHECKABLE,
    "supports": REPRODUCED, "does not support": NOT_REPRODUCED, "source not found": NOT_CHECKABLE,
}  # fmt: skip


def rows(name: str, field: str, claim: str) -> list[Row]:
    """Rows of `data/<name>` whose `field` names the claim; none where there is no such file."""
    return [row for row in table(name) if claim in row[field].split(";")]


def verdict_of(outcomes: Sequence[str]) -> str:
    """The verdict that look-ups with these outcomes give together: theirs if they agree, else "partly". What was not
    found decides nothing by itself, but a claim of which only a part was found holds in part at most."""
    found = {VERDICTS[outcome] for outcome in outcomes}
    if not found:
        raise ValueError("outcomes is empty: at least one look-up is needed")
    if len(found) == 1:
        return found.pop()
    return NOT_REPRODUCED if found == {NOT_REPRODUCED, NOT_CHECKABLE} else PARTLY


def confidence_of(found: Sequence[Row]) -> str:
    return "high" if all(row["checked"] == READ for row in found) else "medium"


def evidence_of(found: Sequence[Row]) -> str:
    """Addresses with the day and the way in which each was read."""
    marks = (", ".join(mark for mark in (row["address"], row.get("date", ""), row["checked"]) if mark) for row in found)
    return "; ".join(marks)


def _finding(claim: Claim, found: Sequence[Row], outcome: str, field: str) -> Finding:
    texts = [row[field].rstrip(".") for row in found]
    text = claim.reason or "; ".join(text[0].upper() + text[1:] for text in texts) + "."
    verdict = verdict_of([row[outcome] for row in found])
    if verdict == NOT_CHECKABLE:
        return Finding(verdict, text, claim.would_change)
    read = [row for row in found if row["address"]]
    checks = tuple(
        Check(f"{row.get('id') or row.get('key', 'a source')} {row[outcome]}", VERDICTS[row[outcome]] == REPRODUCED)
        for row in found
    )
    return Finding(
        verdict, text, claim.would_change, confidence_of(read), evidence_of(read), checks=checks, basis=PRINTED
    )  # fmt: skip


def source_says(claim: Claim) -> Finding | None:
    """What `data/sources.csv` found; rows that are mere inputs of a model do not count. None where it has no row."""
    found = [row for row in rows("sources.csv", "claim", claim.id) if row["outcome"] != "input"]
    return _finding(claim, found, "outcome", "found") if found else None


def reference_says(claim: Claim) -> Finding | None:
    """Whether the reference, as far as it was read, supports what it is cited for. None where it has no row."""
    found = rows("references.csv", "claims", claim.id)
    return _finding(claim, found, "supports", "note") if found else None


def decide(claim: Claim) -> Finding | None:
    """The finding about a claim that is to be compared with its source; None if it is not, or nobody looked it up."""
    return (source_says(claim) or reference_says(claim)) if "source" in claim.kinds else None

"""Rules for claims whose only check is a source: what `data/sources.csv` and `data/references.csv` hold decides them.

One rule for all of them: every look-up that confirms a claim, contradicts it or does so in part counts once, whatever
we think of the source; its address and how it was read become the evidence. Nothing is read at import. Not here: claims
that a model or a measurement decides as well.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence

from tq.book import paths
from tq.book.ledger import NOT_CHECKABLE, NOT_REPRODUCED, NOT_YET, PARTLY, REPRODUCED, Claim, Facts, Finding, Rule

Row = dict[str, str]
READ = "read in source"
VERDICTS = {
    "confirms": REPRODUCED, "partly": PARTLY, "differs": NOT_REPRODUCED, "not found": NOT_CHECKABLE,
    "supports": REPRODUCED, "does not support": NOT_REPRODUCED, "source not found": NOT_CHECKABLE,
}  # fmt: skip
ANOTHER = "Another source, or the one that was meant."


def rows(name: str, field: str, claim: str) -> list[Row]:
    """Rows of `data/<name>` whose `field` names the claim; none where there is no such file."""
    path = paths.root() / "data" / name
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if claim in row[field].split(";")]


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


def _finding(found: Sequence[Row], outcome: str, text: str) -> Finding:
    verdict = verdict_of([row[outcome] for row in found])
    if verdict == NOT_CHECKABLE:
        return Finding(verdict, f"source {text}" if text.startswith("not found") else text, "A source.")
    read = [row for row in found if row["address"]]
    return Finding(verdict, text, ANOTHER, confidence_of(read), evidence_of(read))


def source_says(claim: Claim, facts: Facts) -> Finding:
    """What `data/sources.csv` found; rows that are mere inputs of a model do not count."""
    found = [row for row in rows("sources.csv", "claim", claim.id) if row["outcome"] != "input"]
    if not found:
        return Finding(NOT_YET, "not looked up yet: data/sources.csv has no row that decides it", "Such a row.")
    said = [f"{row['outcome']}: {row['found'].rstrip('.')}" for row in found]
    return _finding(found, "outcome", "; ".join(said))


def reference_says(claim: Claim, facts: Facts) -> Finding:
    """Whether the reference, as far as it was read, supports what it is cited for."""
    found = rows("references.csv", "claims", claim.id)
    if not found:
        return Finding(NOT_YET, "not looked up yet: data/references.csv has no row for it", "Such a row.")
    return _finding(found, "supports", "; ".join(f"{row['supports']}: {row['note'].rstrip('.')}" for row in found))


# Claims whose only check is a source, with a row that decides them; a test holds the list against the data.
BY_SOURCE = (
    "S0-066 S0-068 S1-003 S1-014 S1-017 S1-022 S3-002 S3-005 S3-006 S3-007 S3-008 S3-015 S3-026 S3-037 S3-039 "
    "S3-041 S3-046 S3-064 S3-071 S4-011 S4-015 S4-016 S4-018 S4-019 S4-020 S4-021 S4-022 S4-023 S4-024 S4-025 "
    "S4-026 S4-029 S4-032 S4-035 S4-037 S4-038 S4-039 S4-040 S4-041 S4-049 S4-077 S4-088 S4-097 S4-099"
)
BY_REFERENCE = "S0-067 S0-069"  # the claim is about a reference, or about what one of them reports
# looked up as well, but judged by rules of their own
OWN_RULE = (
    "S0-004 S0-005 S0-011 S0-013 S0-015 S0-020 S0-021 S0-022 S0-023 S0-024 S0-025 S0-038 S0-040 S0-041 S3-003 S4-091"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(BY_SOURCE.split(), source_says),
    **dict.fromkeys(BY_REFERENCE.split(), reference_says),
}

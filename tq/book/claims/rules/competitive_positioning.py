"""Rules over what other methods compress."""

from __future__ import annotations

from tq.book.claims.ledger import (
    NOT_CHECKABLE,
    NOT_REPRODUCED,
    NOT_YET,
    PARTLY,
    REPRODUCED,
    Claim,
    Finding,
    Results,
    Rule,
)
from tq.book.claims.sources import confidence_of, evidence_of, rows


def only_one(claim: Claim, results: Results) -> Finding:
    """A superlative falls with one counter-example: a method that compresses both, with AdamW in mixed precision."""
    found = [row for row in rows("sources.csv", "claim", claim.id) if row["outcome"] != "input"]
    if not found:
        return Finding(NOT_YET, "not looked up yet: data/sources.csv has no row that decides it", "Such a row.")
    against = [row for row in found if row["outcome"] == "differs"]
    near = [row for row in found if row["outcome"] == "partly"]
    read = [row for row in found if row["address"]]
    if not read:
        return Finding(NOT_CHECKABLE, "no other method was found, which proves nothing", "A source.")
    verdict = NOT_REPRODUCED if against else PARTLY if near else REPRODUCED
    said = "; ".join(row["found"].rstrip(".") for row in against or near or read)
    text = f"{said}. Left is the combination of four bits on both axes, of which no other was found"
    change = "A definition of both axes that leaves out what these methods compress."
    return Finding(verdict, text, change, confidence_of(read), evidence_of(read), "competitive-positioning")


RULES: dict[str, Rule] = {"S0-011": only_one}

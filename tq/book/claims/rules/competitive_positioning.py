"""Rules over what other methods compress."""

from __future__ import annotations

from tq.book.claims.ledger import NOT_CHECKABLE, NOT_YET, PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.sources import confidence_of, evidence_of, rows
from tq.book.claims.words import Check

SAID = {  # id in data/sources.csv -> what the reason says of it
    "only-framework-deepseek": "DeepSeek-V3 keeps activations and sends experts' inputs in FP8, with AdamW",
    "only-framework-fp8-lm": "FP8-LM sends 8-bit gradients and keeps 8-bit Adam states",
}


def only_one(claim: Claim, results: Results) -> Finding:
    """A superlative falls with one counter-example: a method that compresses both, with AdamW in mixed precision; one
    that comes near leaves it in part."""
    known = [row for row in rows("sources.csv", "claim", claim.id) if row["outcome"] != "input"]
    if not known:
        return Finding(NOT_YET, "Not looked up yet: data/sources.csv has no row that decides it.", "Such a row.")
    read = [row for row in known if row["address"]]
    if not read:
        return Finding(NOT_CHECKABLE, "No other method was found, which proves nothing.", "A method of somebody else.")
    both = [row for row in known if row["outcome"] == "differs"]
    near = [row for row in known if row["outcome"] == "partly"]
    checks = (
        Check(f"methods that compress both: {len(both)}, near it: {len(near)}, needed none", not both and not near),
        Check(f"only methods near it: {len(near)}", not both and bool(near), True),
    )
    against = [SAID[row["id"]] for row in both if row["id"] in SAID]
    text = "; ".join(against) if against else "No method that compresses both was found"
    text += ". Four bits on both axes no other was found to have."
    change = "A definition of both axes that leaves out what DeepSeek-V3 and FP8-LM compress."
    return found(claim, checks, text, change, confidence_of(read), evidence_of(read), see="competitive-positioning",
                 basis=PRINTED)  # fmt: skip


RULES: dict[str, Rule] = {"S0-011": only_one}

"""Rules over what other methods compress."""

from __future__ import annotations

from tq.book.claims.ledger import NOT_CHECKABLE, NOT_YET, PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.sources import confidence_of, evidence_of, rows
from tq.book.claims.words import Check

SAID = {  # id in data/sources.csv -> what the reason says of it
    "only-framework-deepseek": "DeepSeek-V3 keeps activations and sends expert inputs in FP8, with AdamW",
    "only-framework-fp8-lm": "FP8-LM sends 8-bit gradients and keeps Adam's states in 8 and 16 bits",
}


def only_one(claim: Claim, results: Results) -> Finding:
    """Reproduced if no other method that was looked up compresses both communication and memory with AdamW in mixed
    precision. A part holds if the methods that were found compress one of them; one method with both is enough to
    refute the claim."""
    known = [row for row in rows("sources.csv", "claim", claim.id) if row["outcome"] != "input"]
    if not known:
        change = "A row of data/sources.csv that decides it."
        return Finding(NOT_YET, "Not looked up: data/sources.csv has no row that decides it.", change)
    read = [row for row in known if row["address"]]
    if not read:
        change = "A method by other authors that compresses both."
        return Finding(NOT_CHECKABLE, "No other method was found, which proves nothing.", change)
    both = [row for row in known if row["outcome"] == "differs"]
    near = [row for row in known if row["outcome"] == "partly"]
    checks = (
        Check(f"methods that compress both: {len(both)}, one of them: {len(near)} (required: none)",
              not both and not near),
        Check(f"methods that compress only one of them: {len(near)}, and none both", not both and bool(near), True),
    )
    against = [SAID[row["id"]] for row in both if row["id"] in SAID]
    text = f"{', and '.join(against)} (printed)" if against else "No method that compresses both was found"
    text += ". No other method was found to use 4 bits for both."
    change = "A definition of the two bottlenecks that leaves out what DeepSeek-V3 and FP8-LM compress."
    return found(claim, checks, text, change, confidence_of(read), evidence_of(read), see="competitive-positioning",
                 basis=PRINTED)  # fmt: skip


RULES: dict[str, Rule] = {"S0-011": only_one}

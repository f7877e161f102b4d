"""Rules over losses with compressed gradients, moments and weights against AdamW."""

from __future__ import annotations

from tq.book.claims.ledger import MEASURED, UNDECIDED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

CHAPTER = "compressed-adamw"
SAME = 0.01  # nats that a run may end above another and count as the same, where a claim names no margin
CLOSE, LEVEL = 0.003, 0.05  # nats and level of the chapter's own tests of equivalence


def mixed_precision(claim: Claim, results: Results) -> Finding:
    """Reproduced if under autocast, in bf16 and in fp16, the loss with four bits ends within a hundredth of a nat of
    that without, upper end of the 95 % interval included. A part holds if it does in one. Undecided where an interval
    reaches to both sides."""
    entries = {kind: results.entry(CHAPTER, f"amp/{kind}") for kind in ("bfloat16", "float16")}
    ends = {kind: (e["value"], e.get("low", e["value"]), e.get("high", e["value"])) for kind, e in entries.items()}
    p = max(results(CHAPTER, f"amp/{kind}/p") for kind in entries)
    checks = tuple(compare(f"{kind}, nats, upper end", high, most=SAME) for kind, (_, _, high) in ends.items())
    text = "Measured on a CPU with our optimizer under autocast, four bits against none: " + ", ".join(
        f"{gap:+.4f} ({low:+.4f} to {high:+.4f}) nats with {kind}" for kind, (gap, low, high) in ends.items()
    )
    change = "More pairs under autocast, or the same on a GPU, whose kernels differ."
    straddles = any(low < SAME < high for _, low, high in ends.values())
    if straddles:
        text += ": wider than the margin of .01."
        return Finding(UNDECIDED, text, change, "low", checks=checks, basis=MEASURED)
    if p > LEVEL:
        text += f"; equivalence within {CLOSE} is not shown"
    return found(claim, checks, f"{text}.", change, "low")


def drop_in(claim: Claim, results: Results) -> Finding:
    """This book's optimizer gives AdamW's bits where nothing is compressed, or takes its state over; theirs is not
    public, so that it holds in part at most."""
    same, takes = results(CHAPTER, "drop-in/same-bits"), results(CHAPTER, "drop-in/takes-state")
    checks = (
        Check("their optimizer, tried", False),
        in_part(Check("same bits as torch.optim.AdamW where nothing is compressed", bool(same))),
        in_part(Check("takes AdamW's state over", bool(takes))),
    )
    text = (
        f"Ours {'gives' if same else 'does not give'} the bits of torch.optim.AdamW where nothing is compressed and "
        f"{'takes' if takes else 'does not take'} its state over. Theirs is not public."
    )
    return found(claim, checks, text, "The source of their optimizer.", "medium")


RULES: dict[str, Rule] = {
    "S0-051": mixed_precision,
    "T-021": drop_in,
}

"""Rules over losses of GPT-2 sizes, on a GPU."""

from __future__ import annotations

from tq.book.claims.formulas import FAILS, SAME
from tq.book.claims.ledger import NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Finding, Results, Rule

CHAPTER = "loss-at-scale"


def gap_at_124m(claim: Claim, results: Results) -> Finding:
    """The published rule at their size and length: as small as they say, in part if it would pass for the same."""
    gap = results.on_gpu(CHAPTER, "gpt2-124m/published")
    verdict = REPRODUCED if gap <= claim.number() + 0.0005 else PARTLY if gap < SAME else NOT_REPRODUCED  # rounding
    text = f"on another corpus, 124M parameters and 1,500 steps: {gap:+.4f} nats, one pair"
    return Finding(verdict, text, "More pairs, or their corpus.", "low")


def bounded_gap(claim: Claim, results: Results) -> Finding:
    """The published rule's gap of the training loss over the whole run, smoothed, against the end of their range."""
    largest = results.on_gpu(CHAPTER, "gpt2-124m/published/largest-gap")
    verdict = REPRODUCED if largest <= claim.ends()[1] else PARTLY if largest < SAME else NOT_REPRODUCED
    text = f"at 124M the training loss by the published rule is at most {largest:.4f} nats from that of fp32, means of "
    return Finding(verdict, text + "a hundred steps, one pair", "More pairs, or their corpus.", "low")


def run_at_355m(claim: Claim, results: Results) -> Finding:
    """Their run had a gap below .003: by the published rule at 124M and by ours at 355M, or by ours alone."""
    published = results.on_gpu(CHAPTER, "gpt2-124m/published")
    ours = results.on_gpu(CHAPTER, "gpt2-355m/gap")
    verdict = NOT_REPRODUCED if ours >= 0.003 else REPRODUCED if published < 0.003 else PARTLY
    text = (
        f"on another corpus and over 1,500 steps this project's default is {ours:+.4f} nats from fp32 at 355M, one "
        f"pair; the published rule, at 124M, {published:+.4f}"
    )
    return Finding(verdict, text, "The published rule at 355M, and more pairs.", "low")


def gap_after_500(claim: Claim, results: Results) -> Finding:
    """The smoothed training loss by the published rule a third of the way: as near as they say, or no failure."""
    gap = results.on_gpu(CHAPTER, "gpt2-124m/published/at-a-third")
    verdict = REPRODUCED if gap <= claim.number() + 0.0005 else PARTLY if gap < FAILS else NOT_REPRODUCED  # rounding
    text = f"on another corpus, at 124M, the training loss by the published rule is {gap:+.4f} nats from that of fp32 "
    return Finding(verdict, text + "around step 500 of 1,500, one pair", "More pairs, or their corpus.", "low")


def mixed_precision_after_500(claim: Claim, results: Results) -> Finding:
    """Their run in bf16: by this project's default at 355M and by the published rule at 124M, or by the first alone."""
    ours = results.on_gpu(CHAPTER, "gpt2-355m/at-a-third")
    published = results.on_gpu(CHAPTER, "gpt2-124m/published/at-a-third")
    limit = claim.number() + 0.0005  # rounding
    verdict = NOT_REPRODUCED if ours > limit else REPRODUCED if published <= limit else PARTLY
    text = (
        f"on another corpus and in bf16 this project's default is {ours:+.4f} nats from fp32 at 355M around step "
        f"500 of 1,500, one pair; the published rule, at 124M, {published:+.4f}"
    )
    return Finding(verdict, text, "The published rule at 355M, and more pairs.", "low")


RULES: dict[str, Rule] = {
    "S0-003": run_at_355m,
    "S0-064": run_at_355m,
    "T-006": gap_after_500,
    "T-007": gap_at_124m,
    "T-008": mixed_precision_after_500,
    "T-010": bounded_gap,
}

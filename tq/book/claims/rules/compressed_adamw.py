"""Rules over losses with compressed gradients, moments and weights against AdamW."""

from __future__ import annotations

from tq.book.claims.formulas import FAILS, SAME
from tq.book.claims.ledger import (
    NOT_MEASURED,
    NOT_REPRODUCED,
    PARTLY,
    REPRODUCED,
    Claim,
    Finding,
    Results,
    Rule,
    verdict_for,
)

CHAPTER = "compressed-adamw"


def _failure(results: Results, rule: str) -> tuple[bool, bool, str]:
    """(fails with the published scale, fails with one scale a block, what was found) for 4-bit gradients."""
    exact = results(CHAPTER, "feedback/128/exact")
    published, blocks = (results(CHAPTER, f"feedback/128/{name}") for name in (f"published-{rule}", rule))
    text = (
        f"after 150 steps at about a million parameters, the first 30 in fp32, the loss is {published:+.3f} from the "
        f"{exact:.3f} of the baseline with the published scale and {blocks:+.3f} with one scale a block"
    )
    return published > FAILS, blocks > FAILS, text


def _failure_rule(rule: str) -> Rule:
    def judge(claim: Claim, results: Results) -> Finding:
        """A failure of the method fails with every scale; one of a scale fails with that scale only."""
        published, blocks, text = _failure(results, rule)
        verdict = REPRODUCED if published and blocks else PARTLY if published else NOT_REPRODUCED
        return Finding(verdict, text, "Their code and data, or more seeds at 124M.", "low")

    return judge


def avoided_failure(claim: Claim, results: Results) -> Finding:
    """A proven failure of error feedback with AdamW would show with a sound quantizer too."""
    published, blocks, text = _failure(results, "gradient-ef")
    verdict = REPRODUCED if blocks else PARTLY if published else NOT_REPRODUCED
    text += ", all with error feedback: " + (
        "it fails with both" if blocks else "what fails is the scale" if published else "nothing fails"
    )
    return Finding(verdict, text, "A run in which feedback with one scale a block fails.", "low")


def no_v_communication(claim: Claim, results: Results) -> Finding:
    """Not required if the replicas stay together; in part if they part but the loss does not suffer."""
    drift, gap = results(CHAPTER, "drift/published-v3"), results(CHAPTER, "gap/published-v3")
    verdict = REPRODUCED if drift < 1e-3 else PARTLY if gap < SAME else NOT_REPRODUCED
    text = (
        f"with a local second moment the replicas end {drift:.2f} of their length apart, the first of them {gap:+.3f} "
        "nats from the baseline; exchanging gradients instead needs no second moment to be sent and no drift"
    )
    return Finding(verdict, text, "A run whose replicas stay together with local second moments.", "medium")


def _pairs(results: Results, key: str) -> str:
    n = results.entry(CHAPTER, key)["n"]
    return "one pair" if n == 1 else f"mean of {n} pairs"


def frozen_variance(claim: Claim, results: Results) -> Finding:
    """At a million parameters: divergence is a nat or more, damage a tenth of one."""
    gap = results(CHAPTER, "frozen-v/4")
    verdict = REPRODUCED if gap > 1.0 else PARTLY if gap > FAILS else NOT_REPRODUCED
    text = f"at a million parameters, 4 bits with feedback and v frozen after a fifth of the run: {gap:+.3f} nats, "
    text += _pairs(results, "frozen-v/4") + "; at 124M it was not measured"
    return Finding(verdict, text, "The run at 124M.", "low")


def mixed_precision(claim: Claim, results: Results) -> Finding:
    """Works if the loss under autocast does not depend on the codec."""
    gaps = {kind: results(CHAPTER, f"amp/{kind}") for kind in ("bfloat16", "float16")}
    same = [kind for kind, gap in gaps.items() if gap < SAME]
    verdict = REPRODUCED if len(same) == 2 else PARTLY if same else NOT_REPRODUCED
    text = "this project's optimizer under autocast, 4 bits against none, " + _pairs(results, "amp/float16") + ": "
    text += ", ".join(f"{gap:+.4f} nats with {kind}" for kind, gap in gaps.items())
    return Finding(verdict, text, "The same on a GPU, whose kernels differ.", "low")


def drop_in(claim: Claim, results: Results) -> Finding:
    """Same weights where nothing is compressed, and AdamW's own state taken over."""
    same, takes = results(CHAPTER, "drop-in/same-bits"), results(CHAPTER, "drop-in/takes-state")
    verdict = REPRODUCED if same and takes else PARTLY if same or takes else NOT_REPRODUCED
    text = "this project's optimizer " + ("gives" if same else "does not give") + " the bits of torch.optim.AdamW when "
    text += (
        "nothing is compressed, and "
        + ("takes" if takes else "does not take")
        + " its state over; theirs is not public"
    )
    return Finding(verdict, text, "Their source.", "medium")


def loss_gap(claim: Claim, results: Results) -> Finding:
    """The published rule must stay below with its whole interval; in part if only the shipped one does in the mean."""
    limit = float(claim.value.strip("<"))
    mean, high = results(CHAPTER, "gap/published-v3"), results(CHAPTER, "gap-high/published-v3")
    ours, half = results(CHAPTER, "larger/gap"), results(CHAPTER, "larger/half-width")
    verdict = REPRODUCED if high < limit else PARTLY if min(mean, ours) < limit else NOT_REPRODUCED
    text = (
        f"on another corpus and at a million parameters the published rule is {mean:+.4f} nats from the baseline, "
        f"at most {high:+.4f}; this project's default at five million {ours:+.4f} ± {half:.4f}. 355M is not measured"
    )
    return Finding(verdict, text, "Paired runs at 355M with an interval.", "low")


def long_run(claim: Claim, results: Results) -> Finding:
    """Stable is a gap below a hundredth of a nat with its whole interval, over the steps that the claim names."""
    steps, wanted = results(CHAPTER, "steps"), claim.number() * (1000 if "K" in claim.value else 1)
    gap = results.entry(CHAPTER, "gap/gradient-4-4")
    text = (
        f"the longest runs of this book with an interval have {steps:,.0f} steps, {steps / wanted:.1%} of the "
        f"{wanted:,.0f} that are named; over them four-bit gradients end {gap['value']:+.4f} nats from the baseline"
    )
    if steps < wanted:
        return Finding(NOT_MEASURED, text, "Runs of that length, in pairs.")
    worst = gap.get("high", gap["value"])
    return Finding(verdict_for(worst < SAME, gap["value"] < SAME), text, "Longer runs, or larger models.", "medium")


RULES: dict[str, Rule] = {
    "S0-050": avoided_failure,
    "S0-051": mixed_precision,
    "S0-058": long_run,
    "S0-063": loss_gap,
    "T-003": _failure_rule("gradient-ef"),
    "T-004": _failure_rule("gradient"),
    "T-005": frozen_variance,
    "T-012": no_v_communication,
    "T-017": mixed_precision,
    "T-021": drop_in,
}

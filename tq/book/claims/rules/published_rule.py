"""Rules over the published scheme taken apart, and over error feedback of gradients."""

from __future__ import annotations

from tq.book.claims.formulas import FAILS
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part

CHAPTER = "published-rule"
SAME = 0.01  # nats that a run may end above another and count as the same, where a claim names no margin
WHOLE = "scale-of-a-tensor-own-v-feedback"  # the published scheme with all its parts
START = "after-a-start"


def _least(results: Results, key: str) -> tuple[float, float, float]:
    """(gap at the baseline's learning rate, gap at the arm's own, lower end of the smaller one's 95 % interval)."""
    entries = [results.entry(CHAPTER, f"{key}/{kind}") for kind in ("gap", "own-gap")]
    gaps = [float(entry["value"]) for entry in entries]
    return gaps[0], gaps[1], min(float(entry.get("low", entry["value"])) for entry in entries)


def _failure_rule(kind: str, what: str, change: str) -> Rule:
    def judge(claim: Claim, results: Results) -> Finding:
        """4-bit gradients fail with one scale per block: at both learning rates the whole 95 % interval lies a tenth of
        a nat above fp32. A failure under the published scale alone counts in part."""
        gap, own, low = _least(results, f"million/{kind}")
        published, published_own, published_low = _least(results, f"million/published-{kind}")
        checks = (
            compare("nats above fp32, one scale per block, lower end", low, FAILS),
            in_part(compare("nats above fp32, the published scale, lower end", published_low, FAILS)),
        )
        text = (
            f"Measured: 4-bit gradients {what} feedback end {published:+.3f} nats from fp32 with the published scale "
            f"({published_own:+.3f} at the best rate tried), {gap:+.3f} ({own:+.3f}) with one per block, at a million "
            "parameters after 150 steps on other data."
        )
        return found(claim, checks, text, change, "medium")

    return judge


def avoided_failure(claim: Claim, results: Results) -> Finding:
    """Error feedback of 4-bit gradients fails under AdamW with one scale per block, and the published scheme does not
    fail from the first step on. In part: under the published scale, momentum feedback with a shared second moment ends
    below gradient feedback."""
    gap, own, low = _least(results, "feedback/gradient-ef-4-bits")
    scheme, scheme_own, _ = _least(results, f"first-step/{WHOLE}")
    bare = results(CHAPTER, "feedback/published-gradient-ef-4-bits/gap")
    shared = results(CHAPTER, "first-step/scale-of-a-tensor-mean-v-feedback/gap")
    two = results(CHAPTER, "as-reported/million/gap")
    checks = [
        compare("nats above fp32 by feedback at 4 bits, one scale per block, lower end", low, FAILS),
        compare("nats of the published scheme above fp32, from the first step", min(scheme, scheme_own), most=FAILS),
        in_part(compare("nats of momentum feedback with a shared second moment above fp32", shared, most=bare)),
    ]
    ends = f"{min(scheme, scheme_own):+.3f} to {max(scheme, scheme_own):+.3f}, with two replicas {two:+.3f}"
    text = (
        f"Measured: 4-bit gradients with feedback end {gap:+.3f} nats from fp32 with one scale per block, {bare:+.3f} "
        f"with the published one. The published scheme ends {ends}; with a shared second moment {shared:+.3f}."
    )
    change = "The authors' code, or a run in which feedback fails with one scale per block."
    return found(claim, checks, text, change, "medium")


def no_v_communication(claim: Claim, results: Results) -> Finding:
    """Reproduced if replicas that divide by their own second moments v stay together. A part holds if v of the averaged
    gradient, which follows from two averaged momenta and needs no message, ends within a hundredth of a nat of fp32,
    upper end of the 95 % interval included."""
    drift = results(CHAPTER, f"{START}/{WHOLE}/distance")
    local = results(CHAPTER, f"{START}/{WHOLE}/gap")
    shared = results(CHAPTER, f"{START}/scale-of-a-tensor-mean-v-feedback/gap")
    entry = results.entry(CHAPTER, "added/after-50-steps-in-fp32/gap")
    averaged, high = float(entry["value"]), float(entry.get("high", entry["value"]))
    checks = (
        compare("relative distance of the replicas", drift, most=1e-3),
        in_part(compare("nats from fp32 with v of the averaged gradient, upper end", high, most=SAME)),
    )
    text = (
        f"Measured: with local second moments the replicas end {drift:.2f} lengths of the weights apart and "
        f"{local:+.3f} nats from fp32; averaging v leaves {shared:+.3f}. Of the averaged gradient, v needs no message "
        f"and leaves {averaged:+.3f} (95%: up to {high:+.3f})."
    )
    return found(claim, checks, text, "A run whose replicas stay together with local second moments.", "medium")


RULES: dict[str, Rule] = {
    "S0-050": avoided_failure,
    "T-003": _failure_rule("gradient-ef", "with", "The authors' code, or feedback at another size."),
    "T-004": _failure_rule("gradient", "without", "The authors' code for plain 4-bit gradients."),
    "T-012": no_v_communication,
}

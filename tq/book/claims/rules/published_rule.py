"""Rules over the published scheme taken apart, and over error feedback of gradients."""

from __future__ import annotations

from tq.book.claims.formulas import FAILS
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

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
            f"({published_own:+.3f} at their own learning rate). With one scale per block they end {gap:+.3f} nats "
            f"({own:+.3f}) from it, at a million parameters after 150 steps."
        )
        return found(claim, checks, text, change, "medium")

    return judge


def avoided_failure(claim: Claim, results: Results) -> Finding:
    """Error feedback of 4-bit gradients fails under AdamW with one scale per block, and the published scheme does not
    fail from the first step on. A failure under the published scale, or at one or two bits, counts in part."""
    gap, own, low = _least(results, "feedback/gradient-ef-4-bits")
    scheme, scheme_own, _ = _least(results, f"first-step/{WHOLE}")
    checks = [
        compare("nats above fp32 by feedback at 4 bits, one scale per block, lower end", low, FAILS),
        compare("nats of the published scheme above fp32, from the first step", min(scheme, scheme_own), most=FAILS),
    ]
    for bits in (4, 2, 1):
        fed = _least(results, f"feedback/published-gradient-ef-{bits}-bits")[2]
        what = f"the same under the published scale at {bits} bit{'s' * (bits > 1)}, lower end"
        checks.append(in_part(compare(what, fed, FAILS)))
    bare = results(CHAPTER, "feedback/published-gradient-ef-4-bits/gap")
    text = (
        f"Measured: 4-bit gradients with feedback end {gap:+.3f} nats from fp32 with one scale per block and "
        f"{bare:+.3f} with the published scale. The published scheme itself ends {scheme:+.3f} nats from fp32 "
        f"({scheme_own:+.3f} at its own learning rate)."
    )
    change = "The authors' code, or a run in which feedback fails with one scale per block."
    return found(claim, checks, text, change, "medium")


def no_v_communication(claim: Claim, results: Results) -> Finding:
    """Not required if the replicas stay together; in part if they part but the loss does not suffer."""
    drift = results(CHAPTER, f"{START}/{WHOLE}/drift")
    local, own, _ = _least(results, f"{START}/{WHOLE}")
    shared = results(CHAPTER, f"{START}/scale-of-a-tensor-mean-v-feedback/gap")
    averaged = results(CHAPTER, "added/after-a-start/gap")
    checks: tuple[Check, ...] = (
        compare("relative distance of the replicas", drift, most=1e-3),
        in_part(compare("nats from fp32", min(local, own), most=SAME)),
    )
    text = (
        f"Measured: with local second moments the replicas end {drift:.2f} lengths apart and {local:+.3f} nats from "
        f"fp32; averaging v leaves {shared:+.3f}. Formed from the averaged gradient, v needs no message and leaves "
        f"{averaged:+.3f}."
    )
    return found(claim, checks, text, "A run whose replicas stay together with local second moments.", "medium")


RULES: dict[str, Rule] = {
    "S0-050": avoided_failure,
    "T-003": _failure_rule("gradient-ef", "with", "The authors' code, or feedback at another size."),
    "T-004": _failure_rule("gradient", "without", "The authors' code for plain 4-bit gradients."),
    "T-012": no_v_communication,
}

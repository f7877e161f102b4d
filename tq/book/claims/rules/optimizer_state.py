"""Rules over the bytes of an optimizer's state, and what fewer of them cost."""

from __future__ import annotations

from collections.abc import Sequence

from tq.book.claims.formulas import TIGHT, Formula
from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for

CHAPTER = "optimizer-state"
EIGHT = ("8-8", "bitsandbytes-8-bit", "torchao-8-bit")  # the states of 8 bits that were counted


def _measured(results: Results, what: str, names: Sequence[str]) -> dict[str, float]:
    """What was recorded of ``what``; the first name must be, others may be missing."""
    found = {names[0]: results(CHAPTER, f"{what}/{names[0]}")}
    for name in names[1:]:
        value = results.if_recorded(CHAPTER, f"{what}/{name}")
        found |= {} if value is None else {name: value[0]}
    return found


def eight_bit_saving(claim: Claim, results: Results) -> Finding:
    """Each 8-bit state that was counted must save the claimed share of the optimizer's bytes, to two points."""
    claimed, saved = claim.number() / 100, _measured(results, "saving", EIGHT)
    near = [abs(share - claimed) <= 0.02 for share in saved.values()]
    text = "counted on a real model, the optimizer's state shrinks by "
    text += ", ".join(f"{share:.1%} ({name})" for name, share in saved.items())
    text += f"; of all 16 bytes a parameter of mixed precision it is a factor of {results(CHAPTER, 'whole/8-8'):.2f}"
    change = "A model of many small tensors, which stay in fp32."
    return Finding(verdict_for(all(near), any(near)), text, change, "high", "1 - (1 + 4/256) / 4")


def eight_bit_accuracy(claim: Claim, results: Results) -> Finding:
    """Accuracy is read as held-out loss: every gap with its interval below the claim; in part some mean."""
    limit = claim.ends()[1] / 100
    gaps, worst = _measured(results, "relative", EIGHT), _measured(results, "relative-worst", EIGHT)
    sure = set(worst) >= set(gaps) and all(value < limit for value in worst.values())
    text = "held-out loss against fp32 states changes by "
    text += ", ".join(f"{gaps[n]:+.2%} ({n}; at most {worst[n]:.2%} with its interval)" for n in gaps if n in worst)
    text += ". One small model; the source names no measure of accuracy"
    return Finding(
        verdict_for(sure, any(abs(g) < limit for g in gaps.values())), text, "A longer or larger run.", "low"
    )


def eight_bit_factor(claim: Claim, results: Results) -> Finding:
    """The state's factor or that of all bytes within a tenth of the claim; in part if the claim lies between them."""
    claimed, state, whole = claim.ends()[0], results(CHAPTER, "ratio/8-8"), results(CHAPTER, "whole/8-8")
    close = any(abs(factor / claimed - 1) <= 0.1 for factor in (state, whole))
    text = f"the optimizer's state shrinks by {state:.2f}x, all 16 bytes of mixed precision by {whole:.2f}x; "
    text += "the claim is one of them" if close else f"{claimed:g}x is neither"
    verdict = verdict_for(close, whole < claimed < state)
    return Finding(verdict, text, "A statement of what is counted.", "high", "8 / 2.06; 16 / 10.06")


def smaller_states(claim: Claim, results: Results) -> Finding:
    """Each named optimizer that was counted keeps less than AdamW."""
    adam = results(CHAPTER, "bytes/fp32")
    kept = _measured(results, "bytes", ("adafactor", "sgd-with-momentum", "bitsandbytes-lion"))
    less = [width < 0.9 * adam for width in kept.values()]
    text = f"bytes a parameter beside AdamW's {adam:.3g}: " + ", ".join(f"{w:.3g} ({n})" for n, w in kept.items())
    return Finding(verdict_for(all(less), any(less)), text, "Models without matrices.", "high")


RULES: dict[str, Rule] = {
    "S1-012": eight_bit_saving,
    "S1-013": eight_bit_accuracy,
    "S4-066": Formula("4 + 4 (fp32 moments)", lambda: {"for two fp32 moments of a parameter": 4.0 + 4}, "bytes", TIGHT),
    "S4-067": eight_bit_factor,
    "S4-068": smaller_states,
}  # fmt: skip

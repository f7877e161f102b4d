"""Rules over the bytes of an optimizer's state, and what fewer of them cost."""

from __future__ import annotations

from collections.abc import Sequence

from tq.book.claims.formulas import Formula
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare

CHAPTER = "optimizer-state"
EIGHT = ("8-8", "bitsandbytes-8-bit", "torchao-8-bit")  # the states of 8 bits that were counted
SAID = {
    "8-8": "ours", "bitsandbytes-8-bit": "bitsandbytes", "torchao-8-bit": "torchao", "adafactor": "Adafactor",
    "bitsandbytes-lion": "Lion",
}  # fmt: skip


def _measured(results: Results, what: str, names: Sequence[str]) -> dict[str, float]:
    """What was recorded of ``what``, by how one says its name; the first must be there, others may be missing."""
    known = {SAID[names[0]]: results(CHAPTER, f"{what}/{names[0]}")}
    for name in names[1:]:
        value = results.if_recorded(CHAPTER, f"{what}/{name}")
        known |= {} if value is None else {SAID[name]: value[0]}
    return known


def eight_bit_saving(claim: Claim, results: Results) -> Finding:
    """Each 8-bit state that was counted saves the claimed share of the optimizer's bytes."""
    low, high = (end / 100 for end in claim.bounds())
    saved = _measured(results, "saving", EIGHT)
    checks = [compare(f"share saved by {name}", share, low, high) for name, share in saved.items()]
    text = "Counted on a real model, the optimizer's state shrinks by " + ", ".join(
        f"{share:.1%} ({name})" for name, share in saved.items()
    )
    text += f"; of all 16 bytes a parameter of mixed precision {1 - 1 / results(CHAPTER, 'whole/8-8'):.0%}."
    change = "A model of many small tensors, which stay in fp32."
    return found(claim, checks, text, change, "high", "1 - (1 + 4/256) / 4")


def eight_bit_accuracy(claim: Claim, results: Results) -> Finding:
    """Held-out loss of each 8-bit state moves by less than the claimed share with its whole interval over eight
    seeds."""
    most = claim.bounds()[1] / 100
    worst = _measured(results, "relative-worst", EIGHT)
    checks = [compare(f"change of the loss by {name}, upper end", value, most=most) for name, value in worst.items()]
    text = "Held-out loss rises by at most " + ", ".join(f"{value:.2%} ({name})" for name, value in worst.items())
    text += ", intervals over eight seeds included. One model of a million parameters; fine-tuning is not measured."
    return found(claim, checks, text, "A longer run of a larger model that loses a hundredth.", "low")


def eight_bit_factor(claim: Claim, results: Results) -> Finding:
    """The state, and all bytes of mixed precision, shrink as claimed against the fp32 moments that the document has: it
    does not say which memory it means."""
    state, whole = results(CHAPTER, "ratio/8-8"), results(CHAPTER, "whole/8-8")
    low, high = claim.bounds()
    checks = (compare("state, times", state, low, high), compare("all 16 bytes, times", whole, low, high))
    text = (
        f"Against the fp32 moments that it counts itself the state shrinks {state:.2f} times, all 16 bytes of mixed "
        f"precision {whole:.2f} times. Two would be right against 16-bit moments, {4 * state / 8:.2f}."
    )
    change = "A statement that moments of 16 bits are replaced."
    return found(claim, checks, text, change, "high", "8 / 2.06; 16 / 10.06")


def smaller_states(claim: Claim, results: Results) -> Finding:
    """Each named optimizer keeps less than nine tenths of AdamW's bytes, counted."""
    adam = results(CHAPTER, "bytes/fp32")
    kept = _measured(results, "bytes", ("adafactor", "bitsandbytes-lion"))
    checks = [compare(f"bytes a parameter of {name}", width, most=0.9 * adam) for name, width in kept.items()]
    text = f"Bytes a parameter beside AdamW's {adam:.3g}, counted: " + ", ".join(
        f"{width:.3g} ({name})" for name, width in kept.items()
    )
    return found(claim, checks, text + ".", "A model without matrices.", "high")


RULES: dict[str, Rule] = {
    "S1-012": eight_bit_saving,
    "S1-013": eight_bit_accuracy,
    "S4-066": Formula(
        "4 + 4 (fp32 moments)", lambda: {"a parameter": 4.0 + 4},
        "Two fp32 moments take {0:.0f} bytes a parameter, 8N for a model of N: the document writes N twice.",
        "Moments of another width in Adam.", "bytes",
    ),
    "S4-067": eight_bit_factor,
    "S4-068": smaller_states,
}  # fmt: skip

"""Rules over the bytes of an optimizer's state, and what fewer of them cost."""

from __future__ import annotations

from collections.abc import Sequence

from tq.book.claims.formulas import Formula
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare

CHAPTER = "optimizer-state"
EIGHT = ("8-8", "bitsandbytes-8-bit", "torchao-8-bit")  # the states of 8 bits that were counted
SAID = {
    "8-8": "this book", "bitsandbytes-8-bit": "bitsandbytes", "torchao-8-bit": "torchao", "adafactor": "Adafactor",
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
    """Reproduced if each 8-bit state that was counted saves the claimed share of the optimizer state's bytes. A part
    holds if one does."""
    low, high = (end / 100 for end in claim.bounds())
    saved = _measured(results, "saving", EIGHT)
    checks = [compare(f"share of the state saved, {name}", share, low, high) for name, share in saved.items()]
    text = "Eight bits shrink the optimizer state of a real model by " + ", ".join(
        f"{share:.1%} ({name})" for name, share in saved.items()
    )
    whole = 1 - 1 / results(CHAPTER, "whole/8-8")
    text += f", counted. Of all 16 bytes per parameter of mixed precision this book's state saves {whole:.0%}."
    change = "A model of many small tensors, whose state stays in fp32."
    return found(claim, checks, text, change, "high", "1 - (1 + 4/256) / 4")


def eight_bit_accuracy(claim: Claim, results: Results) -> Finding:
    """Reproduced if the held-out loss with each 8-bit state rises by at most the claimed share, upper end of the
    interval over eight seeds included. A part holds if it does with one."""
    most = claim.bounds()[1] / 100
    worst = _measured(results, "relative-worst", EIGHT)
    checks = [compare(f"share by which the loss rises, upper end, {name}", v, most=most) for name, v in worst.items()]
    text = "The loss stays within " + ", ".join(f"{v:.3%} ({name})" for name, v in worst.items())
    text += " of fp32's, intervals over eight seeds included. This is one model of a million parameters; fine-tuning "
    text += "was not run."
    return found(claim, checks, text, "A longer run of a larger model whose loss rises by 1%.", "low")


def eight_bit_factor(claim: Claim, results: Results) -> Finding:
    """Reproduced if the optimizer state, the 12 bytes per parameter that the document lists (weights and gradients in
    bf16, moments in fp32) and the 16 with an fp32 master copy, where its total begins, all shrink by the claimed
    factor. A part holds if one of them does, because it does not say which memory it means."""
    state, whole = results(CHAPTER, "ratio/8-8"), results(CHAPTER, "whole/8-8")
    listed = (4 + 8) / (4 + 8 / state)
    low, high = claim.bounds()
    checks = (
        compare("times smaller, the state", state, low, high),
        compare("times smaller, the document's 12 bytes", listed, low, high),
        compare("times smaller, all 16 bytes", whole, low, high),
    )
    text = (
        f"With moments in 8 instead of 32 bits the state is counted to be {state:.2f} times smaller, the document's "
        f"12 bytes per parameter {listed:.2f} times, and 16 bytes with an fp32 master copy {whole:.2f} times. "
        "Quality is judged apart."
    )
    change = "A statement which memory is halved."
    return found(claim, checks, text, change, "high", "8 / 2.06; 12 / 6.06; 16 / 10.06")


def smaller_states(claim: Claim, results: Results) -> Finding:
    """Reproduced if each named optimizer keeps at most 90% of the bytes of AdamW's state, as counted. A part holds if
    one does."""
    adam = results(CHAPTER, "bytes/fp32")
    kept = _measured(results, "bytes", ("adafactor", "bitsandbytes-lion"))
    checks = [compare(f"bytes of state per parameter, {name}", width, most=0.9 * adam) for name, width in kept.items()]
    text = " and ".join(f"{name} keeps {width:.2g}" for name, width in kept.items())
    text += f" bytes of state per parameter, where AdamW keeps {adam:.2g} (counted on a real model)."
    return found(claim, checks, text, "A model without weight matrices.", "high")


RULES: dict[str, Rule] = {
    "S1-012": eight_bit_saving,
    "S1-013": eight_bit_accuracy,
    "S4-066": Formula(
        "4 + 4 (fp32 moments)", lambda: {"per parameter": 4.0 + 4},
        "Two fp32 moments take {0:.0f} bytes per parameter, so 8N bytes for N parameters. The document writes 8N bytes "
        "per parameter, which counts N twice.",
        "Adam moments of another width than fp32.", "bytes",
    ),
    "S4-067": eight_bit_factor,
    "S4-068": smaller_states,
}  # fmt: skip

"""Rules over weights in few bits."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part

CHAPTER = "weight-quantization"
MINIMAL = 0.01  # nats that a loss may rise and count as hardly hurt
MODELS = {"book": "the book's model of 3 million parameters", "smollm2": "SmolLM2, 135 million"}


def eight_bits(claim: Claim, results: Results) -> Finding:
    """Reproduced if rounding all weights of the blocks to eight bits raises the held-out loss by at most 0.01 nats in
    both models. A part holds if it does in one."""
    rises = {model: results(CHAPTER, f"rise/{model}/round-to-nearest/8") for model in MODELS}
    checks = tuple(
        compare(f"nats that the loss of {MODELS[model]} rises", rise, most=MINIMAL) for model, rise in rises.items()
    )
    text = (
        f"Rounded to 8 bits with a scale per 64 weights, the loss rises by {rises['book']:+.4f} nats in "
        f"{MODELS['book']} and by {rises['smollm2']:+.4f} in {MODELS['smollm2']} (measured)."
    )
    return found(claim, checks, text, "A model whose loss rises by more than 0.01 nats at 8 bits.", "medium")


def in_the_loop(claim: Claim, results: Results) -> Finding:
    """Reproduced if a model that was trained with its weights rounded to two bits in each of its last steps ends
    lower than the same model trained exactly and rounded afterwards, intervals apart. A part holds if it ends lower at
    all."""
    loop, after = (results.entry(CHAPTER, f"loop/{way}") for way in ("in-the-loop", "rounded-afterwards"))
    gain = after["value"] - loop["value"]
    checks = (
        compare("nats between the intervals", after["low"] - loop["high"], 0.0),
        in_part(compare("nats that it ends lower", gain, 0.0)),
    )
    text = (
        f"At two bits a model of 3 million parameters ends at {loop['value']:.3f} nats with rounding in its last "
        f"steps, and at {after['value']:.3f} when rounded afterwards (measured, two runs)."
    )
    return found(claim, checks, text, "Longer training at two bits, of a larger model.", "medium")


RULES: dict[str, Rule] = {"S4-139": eight_bits, "S4-140": in_the_loop}

"""Rules over adapters and what fits beside them."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, Formula, RangeFormula
from tq.book.claims.ledger import Claim, Rule
from tq.systems import lora


def _adapters(rank: int, width: int = 4096) -> Figure:
    """Parameters of an adapter on a square product, and of the product."""
    return float(lora.adapter_parameters(width, width, rank)), float(width * width)


RULES: dict[str, Rule] = {
    "S4-070": Formula(
        "r (d + k) and d k for d = k = 4,096 and r = 16, the rank that its procedure names",
        lambda: {"at rank 16": _adapters(16)},
        "A product of 4,096 by 4,096 has 16.8 million weights and an adapter of rank 16 {0:,.0f}. The document lost "
        "width "
        "and rank; its procedure has rank 16.",
        "An undamaged copy with another width.", "parameters", claimed=Claim.ends, within=0.2, confidence="medium",
    ),
    "S4-071": Formula(
        "d k / (r (d + k)), d = k = 4,096", lambda: {"at rank 16": lora.adapter_factor(4096, 4096, 16)},
        "At the rank of its own 130K parameters, 16, an adapter on a product of 4,096 by 4,096 has {0:.0f} times "
        "fewer, not about a hundred. Its own 17M over 130K give 131.",
        "Another width or rank than those that are lost.", "x", confidence="medium",
    ),
    "S4-075": RangeFormula(
        "16 bytes a parameter / memory of 80 GB each",
        lambda: {"7B on 8": 7 * 16 / 640, "70B on 64": 70 * 16 / (64 * 80), "70B on 8": 70 * 16 / 640},
        "States of 7B take {0:.0%} of eight cards of 80 GB and those of 70B {1:.0%} of 64: feasible. On eight 70B does "
        "not fit.",
        "Activations that take what the states leave.", "of the memory", claimed=(0.0, 1.0), within=0.0,
        see="impact-memory",
    ),
}  # fmt: skip

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
        "A 4,096 by 4,096 matrix has 16.8 million weights, and its rank-16 adapter {0:,.0f} (computed). The document "
        "lost width and rank; its procedure names rank 16.",
        "An undamaged copy with another width.", "parameters", claimed=Claim.ends, within=0.2, confidence="medium",
    ),
    "S4-071": Formula(
        "d k / (r (d + k)), d = k = 4,096", lambda: {"at rank 16": lora.adapter_factor(4096, 4096, 16)},
        "A rank-16 adapter on a 4,096 by 4,096 matrix has {0:.0f} times fewer parameters (computed), not about a "
        "hundred. The document's own 17M over 130K give 131.",
        "An undamaged copy with another width or rank.", "x", confidence="medium",
    ),
    "S4-075": RangeFormula(
        "16 bytes per parameter / (80 GB * GPUs)",
        lambda: {"7B on 8": 7 * 16 / 640, "70B on 64": 70 * 16 / (64 * 80), "70B on 8": 70 * 16 / 640},
        "The states of 7B are computed to take {0:.0%} of eight 80 GB cards, and those of 70B {1:.0%} of 64. 70B does "
        "not fit on eight; activations are not counted.",
        "Activations that take more than the states leave.", "of the memory", claimed=(0.0, 1.0), within=0.0,
        see="impact-memory",
    ),
}  # fmt: skip

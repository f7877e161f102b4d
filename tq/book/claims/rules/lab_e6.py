"""Rules over adapters and what fits beside them."""

from __future__ import annotations

from tq.book.claims.formulas import LOOSE, TIGHT, Figure, Formula, RangeFormula
from tq.book.claims.ledger import Claim, Rule
from tq.systems import lora


def _adapters(rank: int, width: int = 4096) -> Figure:
    """Parameters of an adapter on a square product, and of the product."""
    return float(lora.adapter_parameters(width, width, rank)), float(width * width)


RULES: dict[str, Rule] = {
    "S4-070": Formula(
        "r (d + k) and d k for d = k = 4,096 and r = 16", lambda: {"at rank 16": _adapters(16)},
        "parameters", 0.05, claimed=Claim.ends, note="The document lost d, k and r; 4,096 and 16 give its figures.",
    ),
    "S4-071": Formula("d k / (r (d + k))", lambda: {"at rank 16": lora.adapter_factor(4096, 4096, 16)}, "x", LOOSE),
    "S4-075": RangeFormula(
        "16 bytes a parameter / memory of 80 GB each",
        lambda: {"7B on 8": 7 * 16 / 640, "70B on 64": 70 * 16 / (64 * 80), "70B on 8": 70 * 16 / 640}, "of the memory",
        TIGHT, claimed=(0.0, 1.0), note="States alone.", see="impact-memory",
    ),
}  # fmt: skip

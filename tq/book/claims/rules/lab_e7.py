"""Rules over quantized weights under adapters."""

from __future__ import annotations

from tq.book.claims.formulas import Formula, ratios
from tq.book.claims.ledger import Rule

RULES: dict[str, Rule] = {
    "S4-074": Formula(
        "16 bits / (4 + scale bits / 128)", lambda: ratios("bf16"),
        "4-bit weights with a bf16 scale per 128 are computed to take {0:.2f} times less memory than 16-bit weights. "
        "With fp32 scales the factor is {1:.2f}.",
        "Scales that take more than one bit per weight.", "x", see="distortion",
    ),
}  # fmt: skip

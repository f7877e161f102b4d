"""Rules over quantized weights under adapters."""

from __future__ import annotations

from tq.book.claims.formulas import Formula, ratios
from tq.book.claims.ledger import Rule

RULES: dict[str, Rule] = {
    "S4-074": Formula(
        "16 / (4 + scale bits / 128)", lambda: ratios("bf16"),
        "Four bits with a scale every 128 numbers take {0:.2f} times less than 16 with bf16 scales and {1:.2f} times "
        "with "
        "fp32 ones.",
        "Scales of more than one bit a weight.", "x", see="distortion",
    ),
}  # fmt: skip

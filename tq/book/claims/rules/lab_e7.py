"""Rules over quantized weights under adapters."""

from __future__ import annotations

from tq.book.claims.formulas import Formula, ratios
from tq.book.claims.ledger import Rule

RULES: dict[str, Rule] = {
    "S4-074": Formula(
        "16 / (4 + scale bits / 128)", lambda: ratios("bf16"), "x", would_change="Another layout of scales.",
        see="distortion",
    ),
}  # fmt: skip

"""Rules over claims of the documents' introductions."""

from __future__ import annotations

from tq.book.claims.formulas import TIGHT, WEIGHTS_ALONE, Formula, gigabytes
from tq.book.claims.ledger import Rule

RULES: dict[str, Rule] = {
    "S4-027": Formula("1.5e9 * 4 bytes", gigabytes(1.5e9, in_fp32=32), "GB", TIGHT, note=WEIGHTS_ALONE),
}  # fmt: skip

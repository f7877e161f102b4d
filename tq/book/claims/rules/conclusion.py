"""Rules over claims of the documents' introductions, and over the documents themselves."""

from __future__ import annotations

from tq.book.claims.formulas import Formula, RangeFormula, gigabytes
from tq.book.claims.ledger import Rule, table


def _words() -> float:
    """Of the fifth document, as counted when it was read (data/documents.csv)."""
    return float(next(row["words"] for row in table("documents.csv") if row["seed"] == "4"))


RULES: dict[str, Rule] = {
    "S4-001": RangeFormula(
        "words of the document (data/documents.csv)", lambda: {"as we have it": _words()},
        "Our copy of the document has {0:,.0f} words (counted), about half of its target. Its formulas are lost.",
        "A longer copy of the document.", "words",
    ),
    "S4-027": Formula(
        "1.5e9 * 4 bytes", gigabytes(1.5e9, in_fp32=32), "1.5 billion weights of 4 bytes take {0:.0f} GB (computed).",
        "Another parameter count than 1.5 billion for GPT-2.", "GB",
    ),
}  # fmt: skip

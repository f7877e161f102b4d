"""Rules over number formats."""

from __future__ import annotations

import torch

from tq.book.claims.formulas import TIGHT, Formula
from tq.book.claims.ledger import Rule

RULES: dict[str, Rule] = {
    "S4-065": Formula(
        "E4M3 reaches 448 and E5M2 57,344",
        lambda: {
            "for the two float8 types of PyTorch": float(
                sum(torch.finfo(d).max == m for d, m in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)))
            )
        }, "formats", TIGHT,
    ),
}  # fmt: skip

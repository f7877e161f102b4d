"""Rules over number formats."""

from __future__ import annotations

import torch

from tq.book.claims.formulas import Figure, RangeFormula
from tq.book.claims.ledger import Rule


def _finer_and_wider() -> dict[str, Figure]:
    """(spacing of E5M2 over that of E4M3, largest number of E5M2 over that of E4M3), as PyTorch has both."""
    fine, wide = torch.finfo(torch.float8_e4m3fn), torch.finfo(torch.float8_e5m2)
    return {"E5M2 over E4M3, spacing and largest number": (wide.eps / fine.eps, wide.max / fine.max)}


RULES: dict[str, Rule] = {
    "S4-065": RangeFormula(
        "spacing at 1 and largest number, both of E5M2 over E4M3 by torch.finfo, above 1", _finer_and_wider,
        "In PyTorch, E5M2 numbers are spaced {0:.0f} times as widely as E4M3 numbers and reach 128 times as far "
        "(computed). E5M2 has less precision and more range, as claimed.",
        "A definition of either format with other bits.", claimed=(1.01, 1e9), within=0.0,
    ),
}  # fmt: skip

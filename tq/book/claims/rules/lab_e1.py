"""Rules over training data: the chance that hashes in bands find a near-duplicate."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, RangeFormula
from tq.book.claims.ledger import Rule

BANDS, ROWS = 14, 8  # as datatrove's example has them
ALIKE, UNLIKE = 0.9, 0.5  # Jaccard similarities of a near-duplicate and of a pair that is none
GOOD = 0.9


def found(similarity: float) -> float:
    """Chance that a pair of this similarity shares one band, 1 - (1 - s^r)^b (Broder 1997; Leskovec et al., MMDS)."""
    return 1 - (1 - similarity**ROWS) ** BANDS


def _both() -> dict[str, Figure]:
    return {"near-duplicates that are found": found(ALIKE), "other pairs that are left": 1 - found(UNLIKE)}


RULES: dict[str, Rule] = {
    "S4-150": RangeFormula(
        "1 - (1 - s^8)^14, nine tenths or more of the pairs that are 90 % alike, at most a tenth of those half alike",
        _both,
        "With 14 bands of eight hashes, MinHash is computed to find {0:.2%} of the pairs that are 90% alike and to "
        "leave {1:.0%} of those that are half alike. No corpus was deduplicated here.",
        "Recall and precision on planted near-duplicates.", "of the pairs", claimed=(GOOD, 1.0), within=0.0,
    ),
}  # fmt: skip

"""Figures that stand in a source: `data/sources.csv` by the id of its rows. One row, one figure; nothing is judged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tq.systems import tables

COLUMNS = (
    "id", "claim", "topic", "question", "found", "outcome", "figure", "unit", "address", "date", "checked",
)  # fmt: skip


@dataclass(frozen=True)
class Cited:
    """low, high: the figure, or its range. outcome: of the claim that it was looked up for."""

    id: str
    low: float
    high: float
    unit: str
    outcome: str
    address: str
    checked: str


@cache
def _rows() -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in tables.read(tables.folder() / "sources.csv", COLUMNS)}


def cited(id: str) -> Cited:
    """A figure by its id. ValueError: an unknown id, or a row without a figure, because its source was not found."""
    if id not in _rows():
        raise ValueError(f"id={id!r}: data/sources.csv has no such row")
    row = _rows()[id]
    if not row["figure"]:
        raise ValueError(f"id={id!r}: data/sources.csv has no figure in this row (outcome: {row['outcome']})")
    low, _, high = row["figure"].partition("-")
    return Cited(id, float(low), float(high or low), row["unit"], row["outcome"], row["address"], row["checked"])

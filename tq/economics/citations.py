"""Figures that sources state, by the id of their row in `data/sources.csv`. It judges nothing and converts no units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tq.economics.intervals import Interval
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
        raise ValueError(f"id={id!r}: no such row in data/sources.csv")
    row = _rows()[id]
    if not row["figure"]:
        raise ValueError(f"id={id!r} holds no figure; it is marked {row['checked']!r}, outcome {row['outcome']!r}")
    low, _, high = row["figure"].partition("-")
    return Cited(id, float(low), float(high or low), row["unit"], row["outcome"], row["address"], row["checked"])


def figure(id: str, unit: str) -> Interval:
    """What the source states, "83-96" as an interval. ValueError as ``cited``, and for another unit."""
    row = _rows().get(id)
    if row is not None and row["unit"] != unit:
        raise ValueError(f"id={id!r}: its unit is {row['unit']!r}, got unit={unit!r}")
    found = cited(id)
    return Interval(found.low, (found.low + found.high) / 2, found.high)

"""Figures that sources state, by the id of their row in `data/sources.csv`. It judges nothing and converts no units."""

from __future__ import annotations

from functools import cache

from tq.economics.intervals import Interval
from tq.systems import tables

COLUMNS = (
    "id", "claim", "topic", "question", "found", "outcome", "figure", "unit", "address", "date", "checked",
)  # fmt: skip


@cache
def _rows() -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in tables.read(tables.folder() / "sources.csv", COLUMNS)}


def figure(id: str, unit: str) -> Interval:
    """What the source states, "83-96" as an interval. ValueError: an unknown id, another unit, no figure."""
    if id not in _rows():
        raise ValueError(f"id={id!r}: no such row in data/sources.csv")
    row = _rows()[id]
    if row["unit"] != unit:
        raise ValueError(f"id={id!r}: its unit is {row['unit']!r}, got unit={unit!r}")
    if not row["figure"]:
        raise ValueError(f"id={id!r} holds no figure; it is marked {row['checked']!r}")
    low, _, high = row["figure"].partition("-")
    ends = float(low), float(high or low)
    return Interval(ends[0], sum(ends) / 2, ends[1])

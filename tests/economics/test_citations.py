"""Figures of sources: what the table states, and what is refused."""

import csv

import pytest

from tq.economics import citations
from tq.systems import tables


def test_every_figure_can_be_read() -> None:
    with open(tables.folder() / "sources.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["figure"]]
    assert len(rows) > 50
    for row in rows:
        found = citations.figure(row["id"], row["unit"])
        assert found.low <= found.mid <= found.high and row["figure"].startswith(f"{found.low:g}"[:1])


def test_a_range_is_an_interval() -> None:
    found = citations.figure("multi-dc-intellect-sync", "min")
    assert (found.low, found.mid, found.high) == (1.0, 4.0, 7.0)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="no such row"):
        citations.figure("nothing", "x")
    with pytest.raises(ValueError, match="its unit is 'min', got unit='s'"):
        citations.figure("multi-dc-intellect-sync", "s")
    with pytest.raises(ValueError, match="not found"):
        citations.figure("ethernet-per-gpu", "")

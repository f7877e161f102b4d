"""The CSV beside a figure holds what the figure plots."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from tests.book import helpers as h
from tq.book.record import figuredata, figures, results


def table(fig: object) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(figuredata.as_csv(figuredata.rows(fig)))))


def test_lines_points_and_limits() -> None:
    fig, ax = figures.figure("half")
    ax.plot([1, 2], [3, 4.123456789], label="rises")
    ax.axhline(0.5)
    ax.scatter([5, 6], [float("nan"), 7], label="dot")
    ax.set_title("panel")
    assert [tuple(row.values())[:5] for row in table(fig)] == [
        ("panel", "line", "rises", "1", "3"),
        ("panel", "line", "rises", "2", "4.12346"),
        ("panel", "line", "", "", "0.5"),
        ("panel", "point", "dot", "", ""),
        ("panel", "point", "dot", "6", "7"),
    ]


def test_bars_histograms_areas_and_intervals() -> None:
    fig, (left, right) = figures.figure("full", 1, 2)
    left.hist([0.5, 1.5, 1.6], bins=2, range=(0, 2))
    right.errorbar([1], [2], yerr=[0.5])
    right.fill_between([0, 1], [0, 0], [1, 1], label="area")
    rows = table(fig)
    bars = [row for row in rows if row["kind"] == "bar"]
    assert [(r["panel"], r["x"], r["x_end"], r["y_end"]) for r in bars] == [("1", "0", "1", "1"), ("1", "1", "2", "2")]
    (interval,) = [row for row in rows if row["kind"] == "interval"]
    assert (interval["panel"], interval["y"], interval["y_end"]) == ("2", "1.5", "2.5")
    assert {row["series"] for row in rows if row["kind"] == "area"} == {"area"}


def test_a_heat_map_gives_its_cells() -> None:
    fig, ax = figures.figure("half")
    ax.pcolormesh(np.array([[1.0, 2.0], [3.0, 4.0]]))
    cells = [row for row in table(fig) if row["kind"] == "cell"]
    assert [row["value"] for row in cells] == ["1", "2", "3", "4"]
    assert (cells[1]["x"], cells[1]["x_end"]) == ("1", "2")


def test_a_chapters_figure_is_kept_with_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = h.book(tmp_path, {"demo": h.notebook("1", name="demo")})
    monkeypatch.setenv("TQ_BOOK_ROOT", str(root))
    ch = results.chapter("demo", device="cpu")
    fig, ax = figures.figure("half")
    ax.plot([1, 2], [3, 4])
    ch.figure("line", fig, alt="A line", caption="A line")
    kept = h.results(root, "demo")["tables"]["figure-line"]
    assert kept["rows"] == 2 and (root / "_build" / kept["path"]).read_text().count("\n") == 3
    with pytest.raises(ValueError, match="figure-x"):
        ch.table("figure-x", None, "caption")

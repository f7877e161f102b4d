"""Measured numbers in prose come through the role; a typed one is found, and what only looks measured is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.book import helpers as h
from tq.book import paths
from tq.book.site import lint
from tq.book.site.lint import Recorded, findings

VALUES = [
    Recorded("demo", "cpu:quick", "mse/b4", 0.0095012),
    Recorded("demo", "cpu:quick", "gap", -0.0173),
    Recorded("demo", "cpu:full", "won", 0.92514),
    Recorded("demo", "cpu:quick", "elements", 7_912_448.0),
    Recorded("demo", "cpu:quick", "time", 26.21),
    Recorded("other", "cuda:full", "speed", 1234.56),
]


def found(text: str, chapter: str = "demo") -> list[str]:
    return [finding.text for finding in findings(text, "page", VALUES, chapter)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("an error of 0.0095 at four bits", "0.0095"),
        ("an error of .0095.", ".0095"),
        ("- it falls by 0.017", "0.017"),
        ("it is \N{MINUS SIGN}0.0173 lower", "\N{MINUS SIGN}0.0173"),
        ("wins on 93 % of them", "93 %"),
        ("wins on 92.5% of them", "92.5%"),
        ("a model of 7.9 million parameters", "7.9 million parameters"),
        ("it has 7,912,448 parameters", "7,912,448 parameters"),
        ("it takes 26 ms", "26 ms"),
        ("| a table | 0.0095 |", "0.0095"),
        ("```{note}\nIt is 0.0095.\n```", "0.0095"),
        ("````{exercise} Name\n:label: x\n\n0.0095?\n```{math}\n1\n```\nand 0.0095\n````", "0.0095"),
        ("**0.0095**, in bold", "0.0095"),
        ("moves 1,234.6 GB/s elsewhere", "1,234.6 GB/s"),
    ],
)
def test_a_typed_result_is_found(text: str, number: str) -> None:
    assert set(found(text)) == {number}


@pytest.mark.parametrize(
    "text",
    [
        "{val}`demo/mse/b4@cpu:quick|.4f` is printed by the role",
        "the formula gives $0.0095$ and\n\n$$ D = 0.0095 $$",
        "`0.0095` in code, ``and `0.0095` here``",
        "```python\nx = 0.0095\n```",
        "~~~\n0.0095\n~~~",
        "```{math}\n0.0095\n```",
        "## A heading with 0.0095",
        "[a link](page-0.0095.html) and https://example.org/0.0095",
        "<!-- 0.0095 --> a comment",
        "---\ntitle: 0.0095\n---\n\ntext",
        "a theory gives 0.0095 <!-- not measured: Lloyd-Max in closed form -->",
        "0.0094 and 0.0096 are other numbers",
        "version 2.0.0095 and v0.0095",
        "26 chapters, a whole number without a unit",
        "0.01 has one digit that says something",
        "10 ms as well",
        "a speed of 1.2 and of 1,230 GB/s: too few digits for a chapter that the page does not quote",
    ],
)
def test_what_is_no_typed_result_is_left_alone(text: str) -> None:
    assert found(text) == []


def test_two_digits_suffice_where_the_page_quotes_the_chapter() -> None:
    assert found("it wins on 93 %", chapter="") == []
    assert found("it wins on 93 %, see {val}`demo/gap@cpu:quick|.3f`", chapter="") == ["93 %"]


def test_the_message_names_the_place_and_the_role() -> None:
    (finding,) = findings("one\n\nan error of 0.0095 here", "notebooks/demo.ipynb, cell 3", VALUES, "demo")
    text = str(finding)
    assert text.startswith("notebooks/demo.ipynb, cell 3, line 3 (an error of 0.0095 here")
    assert "'0.0095'" in text and "{val}`demo/mse/b4@cpu:quick|.4f`" in text and "not measured: why" in text
    (finding,) = findings("wins on 92.5 %", "page", VALUES, "demo")
    assert "{val}`demo/won@cpu:full|.1%`" in finding.message


def test_an_excuse_needs_a_reason_and_covers_its_own_line_only() -> None:
    assert found("0.0095 <!-- not measured: theory -->\nand 0.0095") == ["0.0095"]
    assert found("0.0094 <!-- not measured -->") == ["<!-- not measured -->"]


def test_ends_of_intervals_are_results_too(tmp_path: Path) -> None:
    entry = {"value": 0.5123, "low": 0.4987, "high": 0.5321, "spread": "ci95", "unit": "1", "n": 3}
    extra = {"flag": {"value": True}, "none": {"value": None}, "text": {"value": "x"}}
    h.write(tmp_path / "results/cpu/full/demo.json", {"results": {"a": entry, **extra}})
    values = lint.recorded(tmp_path)
    assert [v.value for v in values] == [0.5123, 0.4987, 0.5321]
    (finding,) = findings("between 0.499 and one", "page", values, "demo")
    assert "|.3f range`" in finding.message


def test_pages_and_markdown_cells_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nb = h.notebook("x = 0.0095  # code", name="demo")
    nb["cells"].append({"cell_type": "markdown", "id": "m", "metadata": {}, "source": ["It is\n", "0.0095."]})
    declared = ["## Declared before the runs\n", "\n", "A margin of 0.0095.\n"]
    nb["cells"].append({"cell_type": "markdown", "id": "d", "metadata": {}, "source": declared})
    root = h.book(tmp_path, {"demo": nb})
    h.write(root / "book/page.md", "# Page\n\n0.009501 in a page\n")
    h.write(root / "data/results/cpu/quick/demo.json", {"results": {"mse": {"value": 0.0095012}}})
    monkeypatch.setenv("TQ_BOOK_ROOT", str(root))
    where = [finding.where.split(" (")[0] for finding in lint.lint()]
    assert where == ["book/page.md, line 3", f"notebooks/demo.ipynb, cell {len(nb['cells']) - 1}, line 2"]
    done = h.tq_book(root, "lint")
    assert done.returncode == 1 and "{val}`demo/mse@cpu:quick|.4f`" in done.stdout
    h.write(root / "data/results/cpu/quick/demo.json", json.dumps({"results": {}}))
    done = h.tq_book(root, "lint")
    assert done.returncode == 0 and done.stdout == "no typed result among 0 recorded numbers\n"


def test_no_measured_number_is_typed_into_this_book() -> None:
    assert paths.root() == h.ROOT
    assert [str(finding) for finding in lint.lint()] == []


def test_a_role_that_a_table_would_split_is_found(tmp_path: Path) -> None:
    good = "| a | {val}`demo/x@cpu:full\\|.2f` |\n\nNo table: {val}`demo/x@cpu:full|.2f`"
    assert lint.findings(good, "page", []) == []
    (found,) = lint.findings("| a | {val}`demo/x@cpu:full|.2f` |", "page", [])
    assert "two cells" in found.message and "line 1" in found.where

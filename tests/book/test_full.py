"""A chapter's page shows the full recording, whatever the quick run in the committed notebook says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.book import helpers as h
from tq.book.record import display
from tq.book.site import full

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8 + (400).to_bytes(4, "big") + (200).to_bytes(4, "big")
QUICK = '<small class="tq-provenance" data-view="cpu/quick/demo">cpu</small>'


def html(text: str) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {"text/html": text}, "metadata": {}}


def stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A recording of the table `sizes`, the table `only-full` and the figure `line`."""
    place = "cpu/full/demo"
    tables = {}
    for name, text in (("sizes", "kind,bytes\nours,123456\nfp32,\n"), ("only-full", "a,b\n1,0.123456789\n")):
        h.write(tmp_path / f"data/tables/{place}/{name}.csv", text)
        tables[name] = {"path": f"tables/{place}/{name}.csv", "caption": f"Table <{name}>"}
    tables["figure-line"] = {"path": "nowhere", "caption": "data of a figure"}
    (tmp_path / f"data/figures/{place}").mkdir(parents=True)
    (tmp_path / f"data/figures/{place}/line.png").write_bytes(PNG)
    figures = {"line": {"path": f"figures/{place}/line.png", "alt": "A line", "caption": "Full"}}
    found = {"device": "cpu", "profile": "full", "results": {}, "tables": tables, "figures": figures}
    h.write(tmp_path / "data/results/cpu/full/demo.json", found)
    return tmp_path


@pytest.fixture
def notebook() -> dict[str, Any]:
    made = h.notebook(
        "# NBVAL_CHECK_OUTPUT\nprint(2)", 'ch.figure("line", fig)', 'if ch.full:\n    ch.table("only-full", frame)',
        'show("sizes")', "print('the same everywhere');", name="demo",
    )  # fmt: skip
    cells = made["cells"]
    cells[3]["outputs"] = [stream("2\n")]
    cells[4]["outputs"] = [html(display.figure_html(PNG + b"quick", "A", "Quick", QUICK, {"name": "line"}))]
    table = display.table_html("a\n1\n", "Quick", QUICK, {"name": "sizes"})
    cells[6]["outputs"] = [stream("secret of the quick run"), html(table)]
    cells[7]["metadata"]["tags"] = ["example"]
    cells[7]["outputs"] = [stream("the same everywhere\n")]
    return made


def test_every_figure_and_table_is_that_of_the_full_recording(root: Path, notebook: dict[str, Any]) -> None:
    before = copy.deepcopy(notebook)
    cells = full.page(notebook, "demo", root)["cells"]
    assert notebook == before
    shown = [[full._html(output) for output in cell.get("outputs", [])] for cell in cells]
    assert [len(each) for each in shown] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert 'data-name="line"' in shown[4][0] and "Full" in shown[4][0] and "Quick" not in shown[4][0]
    assert 'data-name="only-full"' in shown[5][0] and "<td>0.1235</td>" in shown[5][0]
    assert "<td>123,456</td>" in shown[6][0] and "<td>not measured</td>" in shown[6][0]
    assert all("cpu/quick" not in text for texts in shown for text in texts)
    assert "secret" not in json.dumps(cells)


def test_texts_stay_where_they_are_examples(root: Path, notebook: dict[str, Any]) -> None:
    cells = full.page(notebook, "demo", root)["cells"]
    assert cells[7]["outputs"] == [stream("the same everywhere\n")]
    assert cells[3]["outputs"] == [] and cells[3]["source"] == "print(2)" and not cells[7]["source"].endswith(";")


def test_without_a_full_recording_nothing_is_shown_as_found(tmp_path: Path, notebook: dict[str, Any]) -> None:
    cells = full.page(notebook, "demo", tmp_path)["cells"]
    assert "Not measured yet" in cells[1]["source"]
    assert [output for cell in cells for output in cell.get("outputs", [])] == [stream("the same everywhere\n")]


def test_what_no_cell_names_follows_what_was_recorded_before_it() -> None:
    cells = h.notebook('ch.table("first", frame)', "ch.table(name, frame)", "1")["cells"]
    first, other = ("table", "first"), ("figure", "made-up")
    assert full.places(cells, [first, other]) == {first: 0, other: 0}
    assert full.places(cells, [other]) == {other: 2}


def test_a_figure_and_a_table_may_have_one_name() -> None:
    cells = h.notebook('ch.table("same", frame)', 'ch.figure("same", fig)', 'print("same")')["cells"]
    figure, table = ("figure", "same"), ("table", "same")
    assert full.places(cells, [figure, table]) == {figure: 1, table: 0}


RECORDED = sorted((h.ROOT / "data/results").glob("*/full/*.json"))


@pytest.mark.parametrize("chapter", sorted({path.stem for path in RECORDED}))
def test_every_recorded_figure_and_table_stands_on_its_page_once(chapter: str) -> None:
    """Of a recording on a GPU what the one on a CPU lacks."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDED if path.stem == chapter]
    page = full.page(json.loads((h.ROOT / f"notebooks/{chapter}.ipynb").read_text(encoding="utf-8")), chapter)
    shown = full.NAME.findall("".join(full._html(o) for cell in page["cells"] for o in cell.get("outputs", [])))
    tables = {("table", name) for one in found for name in one["tables"] if not name.startswith("figure-")}
    assert sorted(shown) == sorted(tables | {("figure", name) for one in found for name in one["figures"]})


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: f"{p.parents[1].name}-{p.stem}")
def test_every_figure_can_be_read(path: Path) -> None:
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    found = {name: entry["problems"] for name, entry in figures.items() if entry.get("problems")}
    assert found == {}

"""Under every figure and table stands where it came from; what is stale, missing or not measured says so."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.book import helpers as h
from tq.book.record import display
from tq.book.record.dependencies import source_hash

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8 + (400).to_bytes(4, "big") + (200).to_bytes(4, "big")
SMALL = '<small class="tq-provenance" data-view="cpu/quick/demo">cpu</small>'
TABLE = "<table><tbody><tr><td>1</td><td>not measured</td></tr></tbody></table>"


@pytest.fixture(scope="module")
def extension() -> Iterator[ModuleType]:
    sys.path.insert(0, str(h.ROOT / "book" / "_ext"))
    try:
        yield importlib.import_module("tqprovenance")
    finally:
        sys.path.remove(str(h.ROOT / "book" / "_ext"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    h.book(tmp_path, {"demo": h.notebook("1", name="demo")})
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    monkeypatch.delenv("TQ_BOOK_FRESH", raising=False)
    monkeypatch.delenv("TQ_BOOK_FRESH_CHAPTERS", raising=False)
    return tmp_path


def record(root: Path, base: str = "data", view: str = "cpu/quick", **more: Any) -> dict[str, Any]:
    """A recording with one figure, its data, and one table."""
    device, profile = view.split("/")
    place = f"{view}/demo"
    csv = h.write(root / base / f"tables/{place}/sizes.csv", "a,b\n1,\n")
    h.write(root / base / f"tables/{place}/figure-line.csv", "panel,x\n,1\n")
    figure = {"path": f"figures/{place}/line.png", "sha256": hashlib.sha256(PNG).hexdigest(), "caption": "A <line>"}
    tables = {
        "sizes": {"path": csv.relative_to(root / base).as_posix(), "sha256": "x", "caption": "Sizes"},
        "figure-line": {"path": f"tables/{place}/figure-line.csv", "sha256": "y", "caption": "Data"},
    }
    found = {
        "device_name": "A <CPU>, 2 cores", "device": device, "profile": profile, "time_utc": "2026-11-20T11:00:00Z",
        "commit": "0123456789abcdef", "dirty": False, "wall_s": 12.3, "results": {}, "tables": tables,
        "figures": {"line": figure}, "source_hash": source_hash(root / "notebooks/demo.ipynb"), **more,
    }  # fmt: skip
    h.write(root / base / "results" / view / "demo.json", found)
    return found


def complete(extension: ModuleType, root: Path, text: str) -> tuple[str, Any]:
    page = extension.Page(root, "notebooks/demo")
    return page.complete(text), page


def test_a_figure_gets_its_line_its_files_and_an_anchor(extension: ModuleType, root: Path) -> None:
    record(root)
    made, page = complete(extension, root, display.figure_html(PNG, "A line", "A <line>", SMALL, {"name": "line"}))
    for part in ("A &lt;CPU&gt;, 2 cores", "profile quick", "2026-11-20", "commit 0123456789"):
        assert part in made
    assert "make reproduce CHAPTERS=demo DEVICE=cpu PROFILE=quick" in made and "stale" not in made
    assert '<figure class="tq-figure" id="figure-line"' in made
    assert 'src="../_images/cpu/quick/demo/line.png"' in made and "base64" not in made and 'alt="A line"' in made
    assert 'href="../_downloads/tables/cpu/quick/demo/figure-line.csv" download' in made
    assert page.files["_images/cpu/quick/demo/line.png"] == PNG
    assert Path(page.files["_downloads/tables/cpu/quick/demo/figure-line.csv"]).read_text() == "panel,x\n,1\n"
    assert str(root / "data/results/cpu/quick/demo.json") in page.depends


@pytest.mark.parametrize("caption", ["A <line>", "a caption that changed since"])
def test_outputs_without_names_are_known_by_picture_or_caption(extension: ModuleType, root: Path, caption: str) -> None:
    record(root)
    made, _ = complete(extension, root, display.figure_html(PNG, "A line", caption, SMALL))
    assert 'id="figure-line"' in made and "figure-line.csv" in made
    other = PNG + b"1"
    made, page = complete(extension, root, display.figure_html(other, "A line", caption, SMALL))
    known = caption == "A <line>"
    assert ("not the recorded picture" in made) == known and ("figure-line.csv" in made) == known
    assert other in page.files.values()  # it is shown all the same


def test_a_table_gets_its_csv_and_says_what_was_not_measured(extension: ModuleType, root: Path) -> None:
    record(root)
    table = f'<figure class="tq-table">{TABLE}<figcaption>Sizes<br>{SMALL}</figcaption></figure>'
    made, page = complete(extension, root, table)
    assert 'id="table-sizes"' in made and ">CSV</a>" in made and ">PNG</a>" not in made
    assert '<td><span class="tq-badge tq-not-measured">not measured</span></td>' in made
    assert list(page.files) == ["_downloads/tables/cpu/quick/demo/sizes.csv"]


def test_what_is_stale_or_missing_says_so(extension: ModuleType, root: Path) -> None:
    figure = display.figure_html(PNG, "A line", "A <line>", SMALL, {"name": "line"})
    made, _ = complete(extension, root, figure)
    assert "no results recorded" in made and "make reproduce CHAPTERS=demo" in made and "commit" not in made
    assert 'src="../_images/cpu/quick/demo/' in made
    record(root, source_hash="of yesterday")
    made, page = complete(extension, root, figure)
    assert '<strong class="tq-badge tq-stale">stale: the sources have changed since</strong>' in made
    assert "stale" in page.recordings("demo", "cpu/quick/demo")
    record(root, commit=None, dirty=None)
    assert "commit unknown" in complete(extension, root, figure)[0]


def test_fresh_results_go_with_fresh_outputs(
    extension: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(root, commit="c" * 40)
    record(root, "_build", commit="f" * 40)
    figure = display.figure_html(PNG, "A line", "A <line>", SMALL, {"name": "line"})

    def commit() -> str:
        return "fresh" if "ffffffffff" in complete(extension, root, figure)[0] else "committed"

    assert commit() == "committed"
    monkeypatch.setenv("TQ_BOOK_FRESH", "1")
    assert commit() == "fresh"
    monkeypatch.setenv("TQ_BOOK_FRESH_CHAPTERS", "other")  # the outputs of demo are the committed ones
    assert commit() == "committed"
    monkeypatch.setenv("TQ_BOOK_FRESH_CHAPTERS", "demo other")
    assert commit() == "fresh"


def test_the_list_of_recordings_names_what_was_not_measured(extension: ModuleType, root: Path) -> None:
    record(root)
    record(root, view="cuda/full", device_name="NVIDIA H200")
    page = extension.Page(root, "notebooks/demo")
    text = page.recordings("demo", "cpu/quick/demo")
    assert text.count("not measured") == 2 and "NVIDIA H200" in text and "12 s" in text
    download = page.files["_downloads/results/cuda/full/demo.json"]
    recorded = (root / "data/results/cuda/full/demo.json").read_text(encoding="utf-8")
    assert json.loads(download) == json.loads(recorded) and len(download) < len(recorded)


def test_recorded_results_beside_are_those_of_today(extension: ModuleType, root: Path) -> None:
    from tq.book.record import results

    old = str(results.beside("demo", ["x"])._repr_html_())
    assert "not measured" in old
    record(root, view="cpu/full", results={"x": {"value": 0.12345, "low": 0.1, "high": 0.2, "unit": "1"}})
    made, _ = complete(extension, root, old)
    assert "0.1235 [0.1, 0.2]" in made or "0.1234 [0.1, 0.2]" in made
    assert "A &lt;CPU&gt;, 2 cores" in made and made.count("tq-badge tq-not-measured") == 1


def test_a_missing_key_breaks_the_build(root: Path) -> None:
    config = (root / "_config.yml").read_text()
    record(root, results={"x": {"value": 0.5, "unit": "1", "spread": "none", "n": 1}})
    h.write(root / "book/index.md", "# Page\n\n{val}`demo/x@cpu:quick|.1f`\n")
    h.write(root / "_config.yml", config)
    done = h.tq_book(root, "build")
    assert done.returncode == 0, done.stderr
    assert ">0.5</span>" in (root / "_build/html/book/index.html").read_text()
    record(root, results={"y": {"value": 0.5, "unit": "1", "spread": "none", "n": 1}})
    broken = h.tq_book(root, "build")
    assert broken.returncode == 1 and "cpu:quick has no key 'x'" in broken.stderr
    assert ">0.5</span>" in (root / "_build/html/book/index.html").read_text()  # the last good one stays


def test_pages_for_the_disk(extension: ModuleType) -> None:
    clean = importlib.import_module("tqoffline").for_the_disk
    kept = '<link rel="preload" as="script" href="a.js" /><script>const other = 1;</script>'
    gone = (
        '<link rel="preload" as="font" type="font/woff2" crossorigin href="x.woff2" />'
        '<script>const THEBE_JS_URL = "https://example.org"; const x = ".a>b"</script>'
        '<script async="async" src="../_static/sphinx-thebe.js?v=1"></script>'
        '<script type="text/x-thebe-config">{}</script>'
    )
    assert clean(kept + gone + kept) == kept + kept


def test_pictures_are_decoded_as_they_were(extension: ModuleType) -> None:
    text = display.figure_html(PNG, "x", "y", SMALL)
    assert base64.b64decode(extension.PICTURE.search(text)[2]) == PNG
    asked = {"chapter": "demo", "keys": ["a<b"], "profile": "full", "format": ".3g"}
    made = display.Table(None, "c", "", True, {"beside": json.dumps(asked)})
    assert made._data["beside"] == json.dumps(asked)

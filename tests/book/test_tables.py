"""The directives that show data/*.csv: what stands in the file is on the page, as text, and mistakes are warnings."""

from __future__ import annotations

import html
import importlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402

DATA = """name,what,claims,address,bib,outcome
a_b,*no* markup & <i>,S0-001;S0-002,https://www.example.org/x,,differs
c,2,,,,confirms
d,3,,,,
"""
TABLE = "# T\n\n```{data-table} some.csv\n:columns: Name: name what | More: claims, address\n"
sphinx_build = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@pytest.fixture(scope="module")
def tqtables() -> ModuleType:
    sys.path.append(str(h.ROOT / "book" / "_ext"))  # as jupyter-book does for local extensions
    return importlib.import_module("tqtables")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    h.write(tmp_path / "data" / "some.csv", DATA)
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    return tmp_path


def build(root: Path, text: str) -> tuple[str, str]:
    """(HTML of the page, warnings) of a Sphinx build with the extension."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    h.write(root / "source" / "index.md", text)
    warnings = io.StringIO()
    options = {"extensions": ["myst_parser", "tqtables"], "html_theme": "basic"}
    with docutils_namespace():
        app = Sphinx(root / "source", None, root / "out", root / "tree", "html", options, status=None, warning=warnings)
        app.build()
    return (root / "out" / "index.html").read_text(encoding="utf-8"), warnings.getvalue()


def cells(page: str) -> list[list[str]]:
    found = [
        re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    ]
    return [[html.unescape(re.sub("<[^>]+>", "", cell)).strip() for cell in row] for row in found]


@sphinx_build
def test_cells_are_the_file_s_text_and_addresses_are_links(tqtables: ModuleType, root: Path) -> None:
    page, warnings = build(root, TABLE + ":caption: Some *data*\n```\n")
    assert warnings == ""
    assert cells(page) == [
        ["Name", "More"],
        ["a_b\N{NO-BREAK SPACE}*no* markup & <i>", "S0-001, S0-002\nexample.org"],
        ["c\N{NO-BREAK SPACE}2", ""],
        ["d\N{NO-BREAK SPACE}3", ""],
    ]
    assert 'href="https://www.example.org/x"' in page and "Some *data*" in page


@sphinx_build
@pytest.mark.parametrize(
    ("where", "names"),
    [("outcome=differs,confirms", "ac"), ("outcome=*", "ac"), ("outcome=", "d"), ("outcome=* | claims=", "c")],
)
def test_where_selects_rows(tqtables: ModuleType, root: Path, where: str, names: str) -> None:
    page, warnings = build(root, TABLE + f":where: {where}\n```\n")
    assert warnings == "" and "".join(row[0][0] for row in cells(page)[1:]) == names


@sphinx_build
def test_counts_are_counted(tqtables: ModuleType, root: Path) -> None:
    h.write(root / "data" / "some.csv", DATA + "e,4,,,,confirms\n")
    page, warnings = build(root, "# T\n\n```{data-counts} some.csv\n:by: outcome\n```\n")
    shown = re.sub("<[^>]+>", "", "|".join(re.findall(r"<li>(.*?)</li>", page, re.DOTALL)))
    assert warnings == "" and shown.startswith("2 confirms|1 differs|1 none|")  # the theme has lists of its own


@sphinx_build
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE.replace("some.csv", "none.csv") + "```\n", "there is no data/none.csv"),
        (TABLE.replace("claims", "claim") + "```\n", "no field 'claim'; there are name, what, claims"),
        (TABLE.replace("More:", "More") + "```\n", "is not of the form heading: field, field"),
        (TABLE + ":where: outcome\n```\n", "is not of the form field=value,value"),
        (TABLE + ":where: outcome=partly\n```\n", "no row fulfils 'outcome=partly'"),
        ("# T\n\n```{data-counts} some.csv\n:by: outcomes\n```\n", "no field 'outcomes'"),
    ],
)
def test_a_mistake_is_one_warning(tqtables: ModuleType, root: Path, text: str, message: str) -> None:
    page, warnings = build(root, text)
    assert message in warnings and warnings.count("WARNING") == 1 and "<table" not in page


@sphinx_build
def test_a_changed_file_rebuilds_the_page(tqtables: ModuleType, root: Path) -> None:
    build(root, TABLE + "```\n")
    h.touch(h.write(root / "data" / "some.csv", DATA.replace("c,2", "c,77")))
    page, _ = build(root, TABLE + "```\n")
    assert "c\N{NO-BREAK SPACE}77" in html.unescape(page)

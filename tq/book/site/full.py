"""What a chapter's page shows: its committed notebook with the full recording in place of the quick run's outputs.

The committed notebook was executed in the quick profile, which CI repeats cell by cell; its numbers rehearse the code
and are no evidence. So the page takes every figure and table by its name from the full recording, and puts what only
the full profile records under the cell whose source names it. Text outputs are checks of the code and are left out,
but for cells tagged `example`, whose output is the same in every profile. The notebook itself stays as it is.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from tq.book import paths
from tq.book.record import display
from tq.book.record.results import DATA_OF, source_line

EXAMPLE = "example"
NAME = re.compile(r'<figure class="tq-(figure|table)"[^>]*data-name="([^"]+)"')
PLUMBING = re.compile(r"^# NBVAL_\w+\n", re.MULTILINE)
MISSING = """```{admonition} Not measured yet
:class: warning
The full run of this chapter is not recorded: what follows declares it. Its figures and tables appear here when it is.
```"""
DEVICES, PROFILE = ("cpu", "cuda"), "full"  # each figure and table of the first that has it

Notebook = dict[str, Any]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "".join(value)


def _html(output: dict[str, Any]) -> str:
    return _text(output.get("data", {}).get("text/html", ""))


def _output(html: str) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {"text/html": html}, "metadata": {}}


def recorded(chapter: str, root: Path | None = None) -> dict[tuple[str, str], str]:
    """Every figure and table of a chapter's full recording as HTML, by kind ("figure", "table") and name, in the order
    in which they were made; nothing where there is none."""
    base = (root or paths.root()) / "data"
    made: dict[tuple[str, str], str] = {}
    for device in DEVICES:
        found = paths.read_json(base / "results" / device / PROFILE / f"{chapter}.json") or {}
        line = source_line(device, PROFILE, chapter)
        for name, entry in found.get("tables", {}).items():
            if not name.startswith(DATA_OF) and ("table", name) not in made:
                text = (base / entry["path"]).read_text(encoding="utf-8")
                made["table", name] = display.table_html(text, entry["caption"], line, {"name": name})
        for name, entry in found.get("figures", {}).items():
            if ("figure", name) not in made:
                png = (base / entry["path"]).read_bytes()
                made["figure", name] = display.figure_html(png, entry["alt"], entry["caption"], line, {"name": name})
    return made


def places(cells: list[dict[str, Any]], wanted: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """For each figure and table the code cell under which it stands: where the notebook shows it, else where the code
    names it; of one that no cell names in full, the place of the one recorded before it."""
    code = [(number, cell) for number, cell in enumerate(cells) if cell["cell_type"] == "code"]
    shown = {
        found: number
        for number, cell in code
        for output in cell.get("outputs", [])
        for found in NAME.findall(_html(output))
    }

    def naming(pattern: str) -> list[int]:
        return [number for number, cell in code if re.search(pattern, cell["source"])]

    found: dict[tuple[str, str], int] = {}
    for kind, name in wanted:
        literal = rf"""(?<![\w.-])["']{re.escape(name)}["']"""
        named = naming(rf"{kind}\(\s*{literal}") or naming(literal) or [*found.values()] or [code[-1][0]]
        found[kind, name] = shown.get((kind, name), named[-1])
    return found


def page(notebook: Notebook, chapter: str, root: Path | None = None) -> Notebook:
    """A copy of a committed notebook as its page shows it.

    Arguments:
        notebook: nbformat 4, as `json.loads` gives it.
        chapter: its name; the recording is `data/results/cpu/full/<chapter>.json` below `root`, by default the book's;
            what it lacks is taken from that of a GPU.
    """
    made = copy.deepcopy(notebook)
    cells: list[dict[str, Any]] = made["cells"]
    for cell in cells:
        cell["source"] = _text(cell["source"])
    content = recorded(chapter, root)
    where = places(cells, list(content))
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        cell["source"] = PLUMBING.sub("", cell["source"]).rstrip(";")
        example = EXAMPLE in cell["metadata"].get("tags", [])
        kept = [o for o in cell["outputs"] if example and not _html(o).startswith("<figure")]
        cell["outputs"] = kept + [_output(content[one]) for one, place in where.items() if place == number]
    if not content and any("results.chapter" in cell["source"] for cell in cells):
        cells.insert(1, {"cell_type": "markdown", "id": "not-measured-yet", "metadata": {}, "source": MISSING})
    return made

"""A tiny book in a temporary folder, and the real runner on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = 'device = "auto"\nprofile = "quick"\nseed = 0'
# tq.book.record.results without tq itself would not be the real thing, but the chapters below need nothing else of it.
OPEN = 'from tq.book import results\nch = results.chapter("{name}", device=device, profile=profile, seed=seed)'


def notebook(*cells: str, name: str = "") -> dict[str, Any]:
    """A notebook of code cells; with a name it begins with a title, the parameters and an open chapter."""
    head = [PARAMETERS, OPEN.format(name=name)] if name else []
    made: list[dict[str, Any]] = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for i, source in enumerate([*head, *cells])
    ]
    if name:
        made[0]["metadata"]["tags"] = ["parameters"]
        made.insert(0, {"cell_type": "markdown", "id": "title", "metadata": {}, "source": f"# {name}"})
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write(path: Path, content: str | dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def book(root: Path, chapters: dict[str, dict[str, Any]]) -> Path:
    """A book of these chapters: name -> notebook."""
    entries = "".join(f"  - file: notebooks/{name}\n" for name in chapters)
    write(root / "_toc.yml", "format: jb-book\nroot: book/index\n" + (f"chapters:\n{entries}" if chapters else ""))
    write(root / "book" / "index.md", "# A tiny book\n")
    extensions = {name: str(ROOT / "book" / "_ext") for name in ("tqbook", "tqprovenance")}
    config = "title: Tiny\nonly_build_toc_files: true\nexecute: {execute_notebooks: 'off'}\n"
    config += f"sphinx: {{local_extensions: {json.dumps(extensions)}}}\n"
    write(root / "_config.yml", config)
    (root / "notebooks").mkdir(exist_ok=True)
    for name, content in chapters.items():
        write(root / "notebooks" / f"{name}.ipynb", content)
    return root


#: What rules read besides results and sources: the claims, and the tables of the models in their formulas.
TABLES = (
    "claims", "documents", "efficiency", "energy_factors", "hardware", "power", "prices", "published_runs",
    "reliability", "software", "stores",
)  # fmt: skip


def claims_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book with the claims and without any result, which this process takes for the book."""
    (root / "notebooks").mkdir()
    write(root / "_toc.yml", "format: jb-book\nroot: index\n")
    for name in TABLES:
        write(root / "data" / f"{name}.csv", (ROOT / "data" / f"{name}.csv").read_text(encoding="utf-8"))
    monkeypatch.setenv("TQ_BOOK_ROOT", str(root))
    monkeypatch.delenv("TQ_BOOK_FRESH", raising=False)
    return root


def touch(path: Path, later_s: float = 0) -> None:
    """Dates a file by the clock of this process, with which Sphinx compares it; `make soak` sets that clock ahead."""
    os.utime(path, (time.time() + later_s,) * 2)


def environment(root: Path) -> dict[str, str]:
    return dict(os.environ, TQ_BOOK_ROOT=str(root), PYTHONPATH=str(ROOT), JUPYTER_PLATFORM_DIRS="1")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tq.book", *arguments]


def tq_book(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m tq.book ...` on the book at root."""
    return subprocess.run(
        command(*arguments), env=environment(root), cwd=root, capture_output=True, text=True, timeout=400,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def results(root: Path, chapter: str, base: str = "_build", view: str = "cpu/quick") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / base / "results" / view / f"{chapter}.json").read_text("utf-8"))
    return found

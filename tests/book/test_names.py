"""Names of results, tables, figures and pieces are known to be good before hours are spent on what they name."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.book import helpers as h

KEY, NAME = re.compile(r"[a-z0-9_./-]*"), re.compile(r"[a-z0-9_-]*")
ALLOWED = {"record": KEY, "record_samples": KEY, "piece": NAME, "table": NAME, "figure": NAME}


def constants(name: ast.expr) -> list[str]:
    """The texts of a name that are known without running it."""
    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def bad_names(code: str) -> Iterator[str]:
    """Calls ``ch.METHOD(NAME, …)`` whose name holds what that method refuses."""
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        chapter = isinstance(node.func.value, ast.Name) and node.func.value.id == "ch"
        allowed = ALLOWED.get(node.func.attr)
        if chapter and allowed and not all(allowed.fullmatch(text) for text in constants(node.args[0])):
            yield f"ch.{node.func.attr}({ast.unparse(node.args[0])})"


@pytest.mark.parametrize("path", sorted((h.ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_names_are_accepted(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not [bad for cell in cells for bad in bad_names("".join(cell["source"]))]


@pytest.mark.parametrize("code", ['ch.piece(f"hooks/{n}", run)', 'ch.record("Loss", 1.0)', 'ch.table("a b", x, "")'])
def test_a_bad_name_is_found(code: str) -> None:
    assert list(bad_names(code))

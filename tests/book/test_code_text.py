"""What of a file runs: words about it do not count, everything else does."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tq.book.record.code_text import running

ROOT = Path(__file__).parents[2]
PLAIN = '''
import math
def area(radius, label="a # b"):
    text = """kept
      as it is

    """
    return math.pi * radius ** 2, text, f"{radius} # no comment"
class Empty:
    size: int
'''
TOLD = '''"""A module."""

import math  # for pi


def area(radius, label="a # b"):
    """Of a circle.

    More words.
    """
    # kept as it is
    text = """kept
      as it is

    """

    return math.pi * radius ** 2, text, f"{radius} # no comment"  # both


class Empty:
    "Nothing"

    size: int
    """In metres."""
'''


def test_comments_docstrings_and_empty_lines_do_not_count() -> None:
    assert running(TOLD.encode()) == running(PLAIN.encode()) == PLAIN.strip().encode()
    assert running(TOLD.replace("\n", "\r\n").encode()) == running(b"\xef\xbb\xbf" + TOLD.encode())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("** 2", "** 3"), ('"a # b"', '"a # c"'), ("kept\n", "kept \n"), ("as it is\n\n", "as it is\n"),
        ("no comment", "a comment"), ("    size", "  size"), ("size: int", "size: float"),
    ],
)  # fmt: skip
def test_everything_that_runs_counts(before: str, after: str) -> None:
    assert before in PLAIN and running(PLAIN.replace(before, after).encode()) != running(PLAIN.encode())


def test_what_is_not_python_is_refused() -> None:
    with pytest.raises((SyntaxError, tokenize.TokenError)):
        running(b"x = (1,\n")


@pytest.mark.parametrize("path", sorted((ROOT / "tq").rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_of_this_packages_code_is_lost(path: Path) -> None:
    def code(source: bytes) -> list[str]:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(body, list):
                    body[:] = [x for x in body if not (isinstance(x, ast.Expr) and _string(x.value))] or [ast.Pass()]
        return [token.string for token in tokenize.generate_tokens(io.StringIO(ast.unparse(tree)).readline)]

    kept = running(path.read_bytes())
    bodies = [line for line in kept.decode().split("\n")]
    filled: list[str] = []
    for number, line in enumerate(bodies):  # a body that was a docstring alone is a `pass` to the parser
        filled.append(line)
        after = bodies[number + 1] if number + 1 < len(bodies) else ""
        indent, below = (len(x) - len(x.lstrip()) for x in (line, after))
        if line.rstrip().endswith(":") and line.lstrip().startswith(("class ", "def ", ")")) and below <= indent:
            filled.append(" " * (indent + 4) + "pass")
    assert code("\n".join(filled).encode()) == code(path.read_bytes())


def _string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)

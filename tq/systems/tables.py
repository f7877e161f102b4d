"""The tables of `data/` that the models read: found, read with the standard library, checked against their columns.

The folder is `data/` below `TQ_BOOK_ROOT`, else of the tree that this package lies in, else what was installed with it,
else of the first folder upwards from the working directory that has it.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path


def folder() -> Path:
    """The folder `data/`, absolute. FileNotFoundError where there is none."""
    override = os.environ.get("TQ_BOOK_ROOT")
    here, package = Path.cwd().resolve(), Path(__file__).resolve().parents[1]
    roots = [Path(override).resolve()] if override else [package.parent, package, here, *here.parents]
    for root in roots:
        if (root / "data" / "hardware.csv").is_file():
            return root / "data"
    raise FileNotFoundError("no data/hardware.csv: run inside a checkout of the book or set TQ_BOOK_ROOT to one")


def read(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file as {column: text}. ValueError where the header or a row does not have these columns."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ())
            rows = list(reader) if names == list(columns) else []
    except (UnicodeDecodeError, csv.Error):
        raise ValueError(f"{path} is no CSV file in UTF-8") from None
    if names != list(columns):
        shown = f"{names}" if len(str(names)) < 500 else f"{len(names)} columns"
        raise ValueError(f"{path.name} has columns {shown}; accepted are {list(columns)}")
    for line, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise ValueError(f"{path.name}, row {line}: {len(columns)} fields are expected")
    return rows


def number(path: Path, line: int, column: str, text: str) -> float:
    """A finite number of a table; ValueError names file, row and column."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise ValueError(f"{path.name}, row {line}: {column} must be a finite number, got {text!r}")
    return value

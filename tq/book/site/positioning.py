"""Methods beside each other, property by property: `data/positioning.csv`, with what was measured taken from results.

A cell is measured, cited (in the source, or at second hand in a page about it), not applicable or not known; nothing
else, and nothing is asserted. A measured cell names the result that it stands for (`binding`: chapter/key) and reads
"not recorded yet" until a full run has it. A result `.../sent` is in bits per element, so the two ratios are 32 and
16 over it; a result `time/...` is a factor on the time, so the speed-up is its inverse. `condition` says what a number
of one column holds for, as numbers of a column need not be comparable.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tq.book import paths
from tq.book.claims.ledger import NotRecorded, Results

if TYPE_CHECKING:
    import pandas as pd

MEASURED, CITED, SECOND_HAND, NOT_APPLICABLE, NOT_KNOWN, WAITING = (
    "measured", "cited", "cited at second hand", "does not apply", "not known", "not recorded yet",
)  # fmt: skip
STATES = (MEASURED, CITED, SECOND_HAND, WAITING, NOT_KNOWN, NOT_APPLICABLE)
IN_SOURCE = "read in source"
# property -> (heading, how a number of it is written)
PROPERTIES = {
    "wire": ("bits a\nnumber on\nthe wire", "{:.3g}"),
    "ratio_fp32": ("fewer\nbytes than\nfp32", "{:.3g}×"),
    "ratio_bf16": ("fewer\nbytes than\nbf16", "{:.3g}×"),
    "collective": ("collective", "{:.3g}×"),
    "loss_gap": ("loss gap,\nnats", "{:+.3f}"),
    "speed_up": ("speed-up", "{:.3g}×"),
    "state": ("state\nkept, drift", "{:.2g}"),
    "memory": ("memory", "{:.3g}×"),
    "code": ("code\nthat runs", "{:g}"),
}
BASES = {"ratio_fp32": 32.0, "ratio_bf16": 16.0}


@dataclass(frozen=True)
class Cell:
    """One method's property. `short` is what a matrix has room for, `condition` the line below it, `long` all that is
    known."""

    method: str
    property: str
    state: str
    short: str
    long: str
    source: str  # chapter/key of a measured cell, address of a cited one
    condition: str = ""


def _short(figure: str, unit: str) -> str:
    sign = {"x": "×", "%": " %", "bits": ""}.get(unit, f" {unit}")
    return f"{figure.replace('-', '–')}{sign}" if figure else "words"


def _measured(row: dict[str, str], results: Results) -> Cell:
    name, kind, binding = row["name"], row["property"], row["binding"]
    chapter, _, key = binding.partition("/")
    waiting = Cell(name, kind, WAITING, "…", f"to be measured in {row['measured']}", binding)
    if not binding:
        return waiting
    try:
        value = results.entry(chapter, key)["value"]
    except NotRecorded:
        return waiting
    if kind in BASES and key.endswith("/sent"):
        value = BASES[kind] / value
    if kind == "speed_up" and key.startswith("time/"):
        value = 1 / value
    if isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = PROPERTIES[kind][1].format(value).replace("-", "\N{MINUS SIGN}")
        text = text.lstrip("+\N{MINUS SIGN}") if not text.strip("+\N{MINUS SIGN}0.") else text
    return Cell(name, kind, MEASURED, text, text, binding, row["condition"])


def cells(results: Results | None = None) -> list[Cell]:
    """Every cell in the order of the file. A status or property outside the known ones raises."""
    results = Results() if results is None else results
    found = []
    with open(paths.root() / "data" / "positioning.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["property"] not in PROPERTIES:
                raise ValueError(f"property={row['property']!r}: accepted are {', '.join(PROPERTIES)}")
            if row["status"] == MEASURED:
                found.append(_measured(row, results))
            elif row["status"] == CITED:
                short = _short(row["figure"], row["unit"])
                long = f"{row['figure']} {row['unit']}: {row['value']}" if row["figure"] else row["value"]
                state = CITED if row["checked"] == IN_SOURCE else SECOND_HAND
                found.append(Cell(row["name"], row["property"], state, short, long, row["address"], row["condition"]))
            elif row["status"] in (NOT_APPLICABLE, NOT_KNOWN):
                short = {NOT_APPLICABLE: "", NOT_KNOWN: "?"}[row["status"]]
                found.append(Cell(row["name"], row["property"], row["status"], short, row["status"], ""))
            else:
                raise ValueError(f"status={row['status']!r}: accepted are measured, cited, does not apply, not known")
    return found


def matrix(found: Iterable[Cell], what: str = "short") -> pd.DataFrame:
    """Methods by properties, in the order of the file; what: a field of `Cell`."""
    import pandas as pd

    table: dict[str, dict[str, Any]] = {}
    for cell in found:
        table.setdefault(cell.method, {})[cell.property] = getattr(cell, what)
    return pd.DataFrame.from_dict(table, orient="index")[list(PROPERTIES)].rename_axis("method")


def counts(found: Iterable[Cell]) -> dict[str, int]:
    """How many cells have which state, in the order of STATES, none left out."""
    number = Counter(cell.state for cell in found)
    return {state: number[state] for state in STATES}

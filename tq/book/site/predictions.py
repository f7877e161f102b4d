"""Predictions of the chapters, each judged by the recorded result: hit, miss, not tested or not measured.

`data/predictions.csv` holds one row a prediction: the sentence, the range that it allowed, and the key of the result in
the full recording on the CPU, or, as in "step/hook@cuda", on another device.
Where something was changed after a first result, or the run lacked a condition of the sentence, the column "untested"
says so: the value is shown and counts neither as a hit nor as a miss.
A prediction stands there before the run that tests it: of a chapter that is to be recorded again, beside a recording
that lacks its key.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tq.book import paths
from tq.book.record.dependencies import changed

HIT, MISS, UNTESTED, OPEN = "hit", "miss", "not tested", "not measured"
COLUMNS = ("id", "chapter", "prediction", "least", "most", "key", "why", "source", "untested")
DEVICE, PROFILE = "cpu", "full"
_OPEN = {"value": None, "unit": "1"}


@dataclass(frozen=True)
class Prediction:
    """One prediction and what was measured."""

    id: str
    chapter: str
    text: str
    least: float  # -inf: not bounded below
    most: float  # inf: not bounded above
    key: str
    why: str
    value: float | None
    unit: str
    untested: str  # why the value is no test; empty where it is one

    @property
    def outcome(self) -> str:
        if self.value is None:
            return OPEN
        if self.untested:
            return UNTESTED
        return HIT if self.least <= self.value <= self.most else MISS

    @property
    def allowed(self) -> str:
        """The range in words."""
        if math.isinf(self.least):
            return f"at most {self.most:.4g}"
        if math.isinf(self.most):
            return f"at least {self.least:.4g}"
        return f"{self.least:.4g} to {self.most:.4g}"


def predictions(root: Path | None = None) -> list[Prediction]:
    """Every prediction of the book, in the order of the file.

    Raises ``ValueError`` for a row without any bound, with bounds in the wrong order, or whose chapter has a full
    recording of its sources of today that lacks its key.
    """
    base = (root or paths.root()) / "data"
    with open(base / "predictions.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        least = float(row["least"]) if row["least"] else -math.inf
        most = float(row["most"]) if row["most"] else math.inf
        if least > most or (math.isinf(least) and math.isinf(most)):
            raise ValueError(f"{row['id']}: least={row['least']!r}, most={row['most']!r} is no range")
        key, _, device = row["key"].partition("@")
        recording = paths.read_json(base / "results" / (device or DEVICE) / PROFILE / f"{row['chapter']}.json")
        entry = _OPEN if recording is None else recording["results"].get(key)
        if recording is not None and entry is None:
            if not changed(recording, base.parent / "notebooks" / f"{row['chapter']}.ipynb"):
                raise ValueError(f"{row['id']}: {row['chapter']} has recorded no {row['key']!r}")
            entry = _OPEN  # until the chapter is recorded again
        value = None if entry["value"] is None else float(entry["value"])
        unit = str(entry["unit"])
        head = (row["id"], row["chapter"], row["prediction"], least, most)
        found.append(Prediction(*head, row["key"], row["why"], value, unit, row["untested"] or ""))
    return found


def counts(found: list[Prediction]) -> dict[str, int]:
    """How many hit, missed, were not tested, and are open."""
    number = Counter(one.outcome for one in found)
    return {outcome: number[outcome] for outcome in (HIT, MISS, UNTESTED, OPEN)}

"""A superlative falls with one counter-example of data/sources.csv."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.book import helpers as h
from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, X
from tq.book.claims import ledger
from tq.book.claims.rules import competitive_positioning as rules

HEAD = (h.ROOT / "data" / "sources.csv").read_text(encoding="utf-8").splitlines()[0].split(",")


def put(root: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Look-ups of the claim, as (id, outcome)."""
    text = io.StringIO()
    writer = csv.DictWriter(text, HEAD, restval="", lineterminator="\n")
    writer.writeheader()
    for name, outcome in rows:
        address = "" if outcome == "not found" else "https://example.org/x"
        row = {"id": name, "claim": "S0-011", "outcome": outcome, "found": "f.", "address": address, "checked": "c"}
        writer.writerow(row)
    h.write(root / "data" / "sources.csv", text.getvalue())


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        (("differs", "partly"), N),
        (("confirms", "differs"), N),  # whatever else was looked up
        (("partly",), P),  # a method that compresses one of both is no counter-example
        (("confirms",), F),
        (("not found",), X),
        (("input",), ledger.NOT_YET),
        ((), ledger.NOT_YET),
    ],
)
def test_one_counter_example_ends_a_superlative(root: Path, outcomes: tuple[str, ...], wanted: str) -> None:
    put(root, [(f"method-{n}", outcome) for n, outcome in enumerate(outcomes)])
    assert s.verdict("S0-011").verdict == wanted
    assert set(rules.RULES) == {"S0-011"}


def test_the_reason_names_the_counter_examples(root: Path) -> None:
    every = {row["id"] for row in csv.DictReader(io.StringIO((h.ROOT / "data" / "sources.csv").read_text("utf-8")))}
    assert set(rules.SAID) <= every
    put(root, [("only-framework-fp8-lm", "differs"), ("only-framework-deepseek", "confirms")])
    found = s.verdict("S0-011")
    assert found.condition.startswith("FP8-LM") and "DeepSeek" not in found.condition
    put(root, [("only-framework-deepseek", "confirms")])
    assert s.verdict("S0-011").condition.startswith("No method that compresses both was found")

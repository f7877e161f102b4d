"""A superlative falls with one counter-example of data/sources.csv."""

import csv
import io
from pathlib import Path

import pytest

from tests.book import helpers as h
from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, X
from tq.book.claims import ledger
from tq.book.claims.rules import competitive_positioning as rules

HEAD = (h.ROOT / "data" / "sources.csv").read_text(encoding="utf-8").splitlines()[0].split(",")


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [(("differs", "partly"), N), (("partly",), P), (("confirms",), F), (("not found",), X), ((), ledger.NOT_YET)],
)
def test_one_counter_example_ends_a_superlative(root: Path, outcomes: tuple[str, ...], wanted: str) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, HEAD, restval="", lineterminator="\n")
    writer.writeheader()
    for each in outcomes:
        address = "" if each == "not found" else "https://example.org/x"
        writer.writerow({"claim": "S0-011", "outcome": each, "found": f"{each}.", "address": address, "checked": "c"})
    h.write(root / "data" / "sources.csv", text.getvalue())
    assert s.verdict("S0-011").verdict == wanted
    assert set(rules.RULES) == {"S0-011"}

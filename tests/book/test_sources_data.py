"""What was found in sources: each row says what, where and how it was read; what asked for a source was looked up."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("read in source", "read in a secondary page", "not found")
PROPERTIES = (
    "wire", "ratio_fp32", "ratio_bf16", "collective", "loss_gap", "speed_up", "state", "memory", "code",
)  # fmt: skip
FIELDS = {
    "references.csv": (
        "key", "reference", "bib", "used_for", "claims", "says", "checked", "address", "supports", "note",
    ),
    "sources.csv": (
        "id", "claim", "topic", "question", "found", "outcome", "figure", "unit", "address", "date", "checked",
    ),
    "positioning.csv": (
        "method", "name", "compresses", "bib", "property", "status", "value", "figure", "unit", "measured", "binding",
        "address", "checked", "condition",
    ),
}  # fmt: skip
FIGURE = re.compile(r"\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)?")


def rows(name: str) -> list[dict[str, str]]:
    with open(ROOT / "data" / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


REFERENCES, SOURCES, POSITIONING = (rows(name) for name in FIELDS)
CLAIMS = {row["id"]: row for row in rows("claims.csv")}
BIB = set(
    re.findall(r"^@\w+\{([^,\s]+),", (ROOT / "book" / "references.bib").read_text(encoding="utf-8"), re.MULTILINE)
)


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_are_the_documented_ones_and_no_cell_is_ragged(name: str) -> None:
    with open(ROOT / "data" / name, encoding="utf-8", newline="") as file:
        head, *body = list(csv.reader(file))
    assert tuple(head) == FIELDS[name]
    assert {len(row) for row in body} == {len(head)}
    assert [cell for row in body for cell in row if cell != cell.strip() or "\n" in cell] == []


@pytest.mark.parametrize(
    ("found", "key"),
    [(REFERENCES, ("key",)), (SOURCES, ("id",)), (POSITIONING, ("method", "property"))],
    ids=["references", "sources", "positioning"],
)
def test_keys_are_unique(found: list[dict[str, str]], key: tuple[str, ...]) -> None:
    counts = Counter(tuple(row[field] for field in key) for row in found)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("row", [*REFERENCES, *SOURCES], ids=lambda row: row.get("key") or row["id"])
def test_what_was_read_has_an_address_and_what_was_not_has_no_figure(row: dict[str, str]) -> None:
    assert row["checked"] in CHECKED
    address = urlsplit(row["address"])
    if row["checked"] == "not found":
        assert row["address"] == "" and row.get("figure", "") == "" and row.get("says", "") == ""
        assert row.get("outcome", "not found") == "not found"
        assert row.get("supports", "source not found") == "source not found"
    else:
        assert address.scheme in ("https", "http") and "." in address.netloc
        assert row.get("outcome") != "not found" and row.get("supports") != "source not found"


def test_every_claim_exists() -> None:
    named = [(row["key"], claim) for row in REFERENCES for claim in row["claims"].split(";")]
    named += [(row["id"], claim) for row in SOURCES if row["claim"] for claim in row["claim"].split(";")]
    assert [(where, claim) for where, claim in named if claim not in CLAIMS] == []


def test_every_claim_that_asks_for_a_source_was_looked_up() -> None:
    asked = {name for name, row in CLAIMS.items() if "re-verify" in row["evidence"]}
    looked = {claim for row in SOURCES for claim in row["claim"].split(";")}
    assert asked and asked - looked == set()


def test_every_bibliography_key_exists() -> None:
    assert {row["bib"] for row in [*REFERENCES, *POSITIONING]} - {""} - BIB == set()


@pytest.mark.parametrize("row", SOURCES, ids=lambda row: row["id"])
def test_a_row_of_sources_is_complete(row: dict[str, str]) -> None:
    assert row["topic"] and row["question"].endswith("?") and row["found"]
    assert row["outcome"] in ("confirms", "partly", "differs", "not found", "input")
    assert row["claim"] or row["outcome"] == "input", "a source that confirms or differs does so from a claim"
    assert bool(row["figure"]) == bool(row["unit"])
    assert not row["figure"] or FIGURE.fullmatch(row["figure"])
    assert re.fullmatch(r"(?:\d{4}(?:-\d\d(?:-\d\d)?)?)?", row["date"])


def test_prices_have_a_day_unless_the_row_says_why_not() -> None:
    priced = [row for row in SOURCES if row["topic"] == "price" and row["figure"]]
    undated = {row["id"] for row in priced if not row["date"]}
    assert len(priced) > 10
    assert {name for name in undated if not name.endswith(("nebius", "nebius-spot"))} == set()


def test_every_method_has_every_property_once() -> None:
    methods = {row["method"] for row in POSITIONING}
    assert {(row["method"], row["property"]) for row in POSITIONING} == {(m, p) for m in methods for p in PROPERTIES}
    for field in ("name", "compresses", "bib"):
        assert len({(row["method"], row[field]) for row in POSITIONING}) == len(methods)


@pytest.mark.parametrize("row", POSITIONING, ids=lambda row: f"{row['method']}-{row['property']}")
def test_a_cell_is_measured_or_cited_or_empty(row: dict[str, str]) -> None:
    chapters = {
        c["file"] for part in yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"] for c in part["chapters"]
    }
    cited = row["status"] == "cited"
    assert row["status"] in ("measured", "cited", "not known", "does not apply")
    assert (bool(row["value"]), bool(row["address"]), row["checked"] in CHECKED[:2]) == (cited,) * 3
    assert bool(row["measured"]) == (row["status"] == "measured")
    assert not row["measured"] or f"notebooks/{row['measured']}" in chapters
    assert not row["binding"] or row["measured"]
    assert bool(row["figure"]) == bool(row["unit"]) and (cited or not row["figure"])
    assert not row["figure"] or FIGURE.fullmatch(row["figure"])


def test_references_are_judged() -> None:
    accepted = ("supports", "partly", "does not support", "source not found")
    assert all(row["supports"] in accepted and row["used_for"] and row["note"] for row in REFERENCES)

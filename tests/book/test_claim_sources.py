"""What was found in sources decides the claims that are to be compared with one and that no rule decides."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tq.book.claims import judge, ledger, rules, sources  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
F, P, N, X = ledger.REPRODUCED, ledger.PARTLY, ledger.NOT_REPRODUCED, ledger.NOT_CHECKABLE


def table(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((ROOT / "data" / name).read_text(encoding="utf-8"))))


Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Writes rows of sources.csv or references.csv for one claim, with these outcomes."""
    root = h.claims_only(tmp_path, monkeypatch)

    def write(name: str, claim: str, *outcomes: str, checked: str = "read in source") -> None:
        head = table(name)[0].keys()
        names = ("claim", "outcome", "found"), ("claims", "supports", "note")
        about, outcome, text_in = names[name == "references.csv"]
        text = io.StringIO()
        writer = csv.DictWriter(text, head, restval="", lineterminator="\n")
        writer.writeheader()
        for number, each in enumerate(outcomes):
            lost = "not found" in each
            writer.writerow({
                about: f"S0-001;{claim}", outcome: each, text_in: f"what was found {number}.",
                "address": "" if lost else f"https://example.org/{number}",
                "checked": "not found" if lost else checked,
            })  # fmt: skip
        h.write(root / "data" / name, text.getvalue())

    return write


def verdict(name: str) -> ledger.Verdict:
    return next(v for v in judge.verdicts() if v.id == name)


TURNS = [
    (("confirms",), F),
    (("confirms", "confirms", "input"), F),
    (("partly",), P),
    (("confirms", "differs"), P),
    (("confirms", "not found"), P),
    (("partly", "differs"), P),
    (("differs",), N),
    (("differs", "not found"), N),
    (("not found",), X),
]


@pytest.mark.parametrize(("outcomes", "wanted"), TURNS)
@pytest.mark.parametrize("name", ["S3-005", "S4-015"])
def test_what_sources_say_decides(put: Put, name: str, outcomes: tuple[str, ...], wanted: str) -> None:
    put("sources.csv", name, *outcomes)
    found = verdict(name)
    assert found.verdict == wanted, found.condition
    counted = [each for each in outcomes if each != "input"]
    assert found.condition.count("What was found") == len(counted) == len(found.checks) + (wanted == X)
    shown = "".join(each.text for each in found.evidence)
    assert shown.count("https://example.org/") == len([o for o in counted if o != "not found"])


@pytest.mark.parametrize(
    ("supports", "wanted"),
    [("supports", F), ("partly", P), ("does not support", N), ("source not found", X)],
)
@pytest.mark.parametrize("name", ["S0-067", "S0-069"])
def test_what_references_say_decides(put: Put, name: str, supports: str, wanted: str) -> None:
    put("references.csv", name, supports)
    found = verdict(name)
    assert found.verdict == wanted and found.condition == (ledger.claim(name).reason or "What was found 0.")


def test_confidence_is_that_of_the_weakest_reading(put: Put) -> None:
    put("sources.csv", "S4-015", "confirms")
    assert verdict("S4-015").confidence == "high"
    put("sources.csv", "S4-015", "confirms", checked="read in a secondary page")
    assert verdict("S4-015").confidence == "medium"


def test_what_nobody_looked_up_is_not_decided(put: Put) -> None:
    assert {verdict(name).verdict for name in ("S3-005", "S0-067")} == {ledger.NOT_YET}
    put("sources.csv", "S4-015", "input")
    assert verdict("S4-015").verdict == ledger.NOT_YET


def test_a_source_comes_before_a_reference(put: Put) -> None:
    put("references.csv", "S0-067", "supports")
    put("sources.csv", "S0-067", "differs")
    assert verdict("S0-067").verdict == N


@pytest.mark.parametrize("name", ["S0-020", "S3-042", "S1-026"])  # a rule, a measurement, a forecast
def test_a_source_decides_nothing_else(put: Put, name: str) -> None:
    before = verdict(name)
    put("sources.csv", name, "confirms")
    assert verdict(name) == before and before.verdict not in ledger.DECIDED


def test_no_outcome_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="outcomes is empty"):
        sources.verdict_of([])


def test_what_was_looked_up_decides_every_claim_that_only_a_source_can() -> None:
    looked = {c for r in table("sources.csv") if r["outcome"] != "input" for c in r["claim"].split(";") if c}
    looked |= {c for r in table("references.csv") for c in r["claims"].split(";")}
    only = {claim.id for claim in ledger.claims() if claim.kinds == ("source",) and not claim.note} - set(rules.every())
    judged = {v.id: v.verdict for v in judge.verdicts()}
    assert {name for name in only if judged[name] != ledger.NOT_YET} == looked & only
    assert len(looked & only) > 40


def test_every_outcome_of_the_data_has_a_verdict() -> None:
    outcomes = {r["outcome"] for r in table("sources.csv")} - {"input"} | {
        r["supports"] for r in table("references.csv")
    }
    assert outcomes <= set(sources.VERDICTS)

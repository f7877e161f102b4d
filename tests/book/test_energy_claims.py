"""Rules over the chapter energy follow its results."""

import json
from pathlib import Path

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tq.book import claims, energy_claims, ledger  # noqa: E402

Ends = tuple[float, float, float]
RESULTS: dict[str, float | Ends] = {
    "network/lowest": 0.017,
    "network/highest": 0.057,
    "network/with-storage": 0.1,
    "cluster/low": 90.0,
    "cluster/high": 134.0,
    "cluster/rated": 152.0,
    "gpt3/computed": 1289.0,
    "gpt3/usd": 104e3,
    "gpt3/implied": 0.155,
    "frontier/gpt4-class": (54.0, 67.0, 80.0),
    "frontier/llama31-405b": (28.0, 34.0, 41.0),
    "carbon/cluster": 0.46,
    "carbon/mw-for-a-megatonne": 241.0,
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return h.claims_only(tmp_path, monkeypatch)


def put(root: Path, changed: dict[str, float | Ends]) -> None:
    assert set(changed) <= set(RESULTS), "a turn changes a key that no rule reads"
    found = {}
    for key, value in (RESULTS | changed).items():
        low, mid, high = value if isinstance(value, tuple) else (None, value, None)
        found[key] = {"value": mid, "unit": "1", "spread": "none", "n": 1}
        found[key] |= {} if low is None else {"low": low, "high": high, "spread": "range"}
    path = root / "data" / "results" / "cpu" / "full" / f"{energy_claims.ENERGY}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"source_hash": "x", "results": found}))


F, P, N = "reproduced", "partly", "not reproduced"
TURNS: list[tuple[str, dict[str, float | Ends], str]] = [
    ("S0-055", {}, N),
    ("S0-055", {"network/with-storage": 0.16}, P),
    ("S0-055", {"network/lowest": 0.16, "network/highest": 0.21}, F),
    ("S4-043", {}, P),  # by the ratings alone
    ("S4-043", {"cluster/high": 145.0}, F),
    ("S4-043", {"cluster/rated": 190.0}, N),
    ("S4-091", {}, F),
    ("S4-091", {"gpt3/computed": 900.0}, P),
    ("S4-091", {"gpt3/computed": 433.0}, N),
    ("S4-092", {}, P),
    ("S4-092", {"gpt3/usd": 205e3}, F),
    ("S4-092", {"gpt3/usd": 60e3}, N),
    ("S4-093", {}, P),
    ("S4-093", {"frontier/llama31-405b": (60.0, 70.0, 80.0)}, F),
    ("S4-093", {"frontier/gpt4-class": (20.0, 25.0, 30.0)}, N),
    ("S4-098", {}, P),
    ("S4-098", {"carbon/cluster": 0.6}, F),
    ("S4-098", {"carbon/cluster": 0.01}, N),
]


def verdict(name: str) -> ledger.Verdict:
    return next(v for v in claims.verdicts() if v.id == name)


@pytest.mark.parametrize(("name", "changed", "wanted"), TURNS)
def test_each_rule_follows_the_results(root: Path, name: str, changed: dict[str, float | Ends], wanted: str) -> None:
    put(root, changed)
    found = verdict(name)
    assert found.verdict == wanted, found.condition
    assert found.evidence[0].chapter == energy_claims.ENERGY and found.evidence[0].view == "cpu:full"


def test_every_rule_is_turned_three_ways_and_waits_for_its_results(root: Path) -> None:
    assert {name for name, _, _ in TURNS} == set(energy_claims.RULES)
    for name in energy_claims.RULES:
        assert {wanted for turned, _, wanted in TURNS if turned == name} == {F, P, N}
        assert verdict(name).verdict == ledger.NOT_MEASURED


def test_the_figures_of_the_claims_are_read_as_written() -> None:
    shown = {claim.id: claim for claim in ledger.claims()}
    assert shown["S0-055"].ends() == (15.0, 20.0)
    assert shown["S4-093"].ends() == (50.0, 200.0)

"""Rules over impact-infrastructure follow its results, and name what shaped links said where it is recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tq.book import claims, infrastructure_claims, ledger  # noqa: E402

RESULTS: dict[str, float] = {
    "need/datacenters/bf16/50": 84.0,
    "need/datacenters/4-bits/50": 22.0,
    "need/datacenters/diloco-bf16/50": 0.84,
    "need/datacenters/diloco-4/50": 0.22,
    "intellect/use/lowest": 0.84,
    "use/hybrid/bf16/10000": 0.1,
    "use/hybrid/4-bits/10000": 0.3,
    "use/hybrid/diloco-bf16/10000": 0.9,
    "use/hybrid/diloco-4/10000": 0.95,
    "use/pool/fp32/100000": 0.33,
    "use/pool/4-bits/100000": 0.63,
    "use/edge/bf16/100": 0.01,
    "use/edge/4-bits/100": 0.03,
    "use/edge/diloco-bf16/100": 0.48,
    "use/edge/diloco-4/100": 0.78,
}
SHAPED = {"sites/sooner/diloco-32-4": 120.0, "sites/sooner/ddp-4": 6.0, "gap/diloco": 0.02}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return h.claims_only(tmp_path, monkeypatch)


def write(root: Path, chapter: str, values: dict[str, Any]) -> None:
    found = {key: {"value": value, "unit": "1", "spread": "none", "n": 1} for key, value in values.items()}
    path = root / "data" / "results" / "cpu" / "full" / f"{chapter}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"source_hash": "x", "results": found}))


def put(root: Path, changed: dict[str, float]) -> None:
    assert set(changed) <= set(RESULTS), "a turn changes a key that no rule reads"
    write(root, infrastructure_claims.SITES, RESULTS | changed)


F, P, N = "reproduced", "partly", "not reproduced"
ALL_FLIP = {"use/hybrid/4-bits/10000": 0.6, "use/edge/4-bits/100": 0.6}
NONE_FLIP = {"use/pool/4-bits/100000": 0.4, "use/edge/diloco-4/100": 0.4}
IMPOSSIBLE = {"need/datacenters/diloco-bf16/50": 50.0, "intellect/use/lowest": 0.2}
TURNS: list[tuple[str, dict[str, float], str]] = [
    ("S0-041", {}, N),
    ("S0-041", {"need/datacenters/4-bits/50": 8.0}, P),
    ("S0-041", {"need/datacenters/4-bits/50": 8.0, **IMPOSSIBLE}, F),
    ("S0-041", IMPOSSIBLE, N),  # and four bits do not change it
    ("S0-041", {"need/datacenters/4-bits/50": 2.0, "need/datacenters/bf16/50": 8.0}, N),
    ("S0-042", {}, P),
    ("S0-042", ALL_FLIP, F),
    ("S0-042", NONE_FLIP, N),
    ("S0-042", {"use/pool/4-bits/100000": 0.4}, P),  # the edge with DiLoCo is left
]


def verdict(name: str) -> ledger.Verdict:
    return next(v for v in claims.verdicts() if v.id == name)


@pytest.mark.parametrize(("name", "changed", "wanted"), TURNS)
def test_each_rule_follows_the_results(root: Path, name: str, changed: dict[str, float], wanted: str) -> None:
    put(root, changed)
    found = verdict(name)
    assert found.verdict == wanted, found.condition
    assert found.evidence[0].chapter == infrastructure_claims.SITES and found.evidence[0].view == "cpu:full"


def test_every_rule_is_turned_three_ways_and_waits_for_its_results(root: Path) -> None:
    over_results = set(infrastructure_claims.RULES)
    assert {name for name, _, _ in TURNS} == over_results
    for name in over_results:
        assert {wanted for turned, _, wanted in TURNS if turned == name} == {F, P, N}
        assert verdict(name).verdict == ledger.NOT_MEASURED


def test_shaped_links_are_named_where_they_are_recorded_and_change_no_verdict(root: Path) -> None:
    put(root, {})
    assert "it is not measured" in verdict("S0-041").condition
    write(root, infrastructure_claims.SHAPED, SHAPED)
    found = verdict("S0-041")
    assert found.verdict == N and "120 times with DiLoCo" in found.condition
    assert infrastructure_claims.SHAPED in {each.chapter for each in found.evidence}

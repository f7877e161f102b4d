"""Rules over impact-memory follow its results; each sum over a formula can be turned."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tq.book import capacity_claims, claims, ledger  # noqa: E402
from tq.systems import offload  # noqa: E402

SETTINGS = ("none", "none-fused", "selective", "full")
SIZES = ("7b", "13b", "70b")
RESULTS: dict[str, float] = {
    **{f"gain/{size}/{s}": 1.6 if s == "full" else 3.2 for size in SIZES for s in SETTINGS},
    **{f"recompute-gain/{size}": 9.0 for size in SIZES},
    "needed/2": 0.68,
    "needed/3": 0.91,
    **{f"table/7b/{s}/batch": 50.0 if s == "full" else 100.0 for s in SETTINGS},
    **{f"table/13b/{s}/batch": 27.0 if s == "full" else 52.0 for s in SETTINGS},
    **{f"table/{size}/{s}/context": 500.0 for size in ("7b", "13b") for s in SETTINGS},
    **{f"time/{n}/coded/most": v for n, v in (("400g", 0.01), ("100g", 0.01), ("25g", 0.4))},
    "time/400g/free/most": 0.02,
    "time/instead-of-recompute": 0.18,
    **{"tp/layouts": 59.0, "tp/reach": 0.15, "tp/keep": 0.6, "tp/nothing": 0.3, "tp/enabled": 0.47},
    **{f"least/{n}/{r}": v for n in ("plain", "coded") for r, v in (("none", 32.0), ("full", 16.0))},
    **{"hours/halved": 1.0, "hours/coded": 0.94, "hours/halved-coded": 0.94},
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return h.claims_only(tmp_path, monkeypatch)


def put(root: Path, changed: dict[str, Any]) -> None:
    values = RESULTS | changed
    assert set(values) == set(RESULTS), "a turn changes a key that no rule reads"
    found = {key: {"value": value, "unit": "1", "spread": "none", "n": 1} for key, value in values.items()}
    path = root / "data" / "results" / "cpu" / "full" / f"{capacity_claims.MEMORY}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"source_hash": "x", "results": found}))


F, P, N = "reproduced", "partly", "not reproduced"


def every(pattern: str, value: float) -> dict[str, float]:
    return {
        key: value for key in RESULTS if key.startswith(pattern.split("*")[0]) and key.endswith(pattern.split("*")[1])
    }


TURNS: list[tuple[str, dict[str, float], str]] = [
    ("S0-009", {}, P),
    ("S0-009", every("gain/*/full", 2.2), F),
    ("S0-009", every("gain/*none", 1.5), N),
    *(
        (name, changed, wanted)
        for name, size, good in (("S0-045", "7b", 80.0), ("S0-047", "13b", 40.0))
        for changed, wanted in (
            ({}, P), (every(f"table/{size}/*batch", good), F), (every(f"table/{size}/*batch", 20.0), N)
        )
    ),
    ("S0-046", {}, P),
    ("S0-046", every("time/*coded/most", 0.25), F),
    ("S0-046", {"time/25g/coded/most": 0.05}, N),
    ("S0-046", {"time/25g/coded/most": 0.05, "time/instead-of-recompute": 0.25}, P),
    ("S0-048", {}, P),
    ("S0-048", {"tp/reach": 0.95}, F),
    ("S0-048", {"tp/reach": 0.0}, N),
    *(
        (name, changed, wanted)
        for name in ("S0-010", "S0-049")
        for changed, wanted in (
            ({}, P), ({"least/coded/none": 16.0, "least/coded/full": 8.0}, F), ({"tp/enabled": 0.0}, N)
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "wanted"), TURNS)
def test_each_rule_follows_the_results(root: Path, name: str, changed: dict[str, float], wanted: str) -> None:
    put(root, changed)
    found = next(v for v in claims.verdicts() if v.id == name)
    assert found.verdict == wanted, found.condition
    assert found.evidence[0].chapter == capacity_claims.MEMORY and found.evidence[0].view == "cpu:full"


def test_every_rule_is_turned_three_ways_and_waits_for_its_results(root: Path) -> None:
    over_results = set(capacity_claims.RULES) - set(capacity_claims.SUMS)
    assert {name for name, _, _ in TURNS} == over_results
    for name in over_results:
        assert {wanted for turned, _, wanted in TURNS if turned == name} == {F, P, N}
        assert next(v for v in claims.verdicts() if v.id == name).verdict == ledger.NOT_MEASURED


@pytest.mark.parametrize("name", capacity_claims.SUMS)
def test_each_sum_can_be_turned(name: str) -> None:
    rule = capacity_claims.SUMS[name]
    (claim,) = [c for c in ledger.claims() if c.id == name]
    found = rule(claim, ledger.Facts())
    assert found.verdict in ledger.DECIDED and found.formula and found.confidence in ("high", "medium")
    (first, *_) = rule.readings().values()
    ranged = isinstance(rule, capacity_claims.Within)
    far: Any = (7e12, 8e12) if ranged else 7e12
    near: Any = (first, first) if ranged else first
    assert dataclasses.replace(rule, claimed=far)(claim, ledger.Facts()).verdict == N
    assert dataclasses.replace(rule, claimed=near, within=1e-9)(claim, ledger.Facts()).verdict != N
    wide: Any = (0.0, 1e15) if ranged else near
    assert dataclasses.replace(rule, claimed=wide, within=1e12)(claim, ledger.Facts()).verdict == F


def test_formulas_reproduce_their_sources() -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5B at 64 ranks, 120 GB to 31.4, 16.6 and 1.9 GB
    for stage, gigabytes in ((1, 31.4), (2, 16.6), (3, 1.9)):
        assert 120 / capacity_claims._zero(stage, 64) == pytest.approx(gigabytes, rel=0.02)
    assert capacity_claims._bubble(8, 8) == pytest.approx(100 * 7 / 15)
    assert capacity_claims._interval_min(16384, 60) == pytest.approx(19.3, abs=0.1)
    assert capacity_claims._kv_gb(8, 1) * 1e9 == 327_680
    assert offload.place("nvme-gen4").read_bytes_per_s == pytest.approx(capacity_claims.NVME * 1e9)

"""The rules over offloading follow results that only a GPU gives, and what the document itself says."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tq.book import claims, ledger, offload_claims  # noqa: E402

F, P, N = "reproduced", "partly", "not reproduced"
RESULTS = {"step/torchao/fp32": 1.3, "step/host/fp32": 1.1}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return h.claims_only(tmp_path, monkeypatch)


def verdict(name: str) -> ledger.Verdict:
    return next(v for v in claims.verdicts() if v.id == name)


def put(root: Path, device: str, changed: dict[str, Any]) -> None:
    found = {k: {"value": v, "unit": "x", "spread": "none", "n": 1} for k, v in (RESULTS | changed).items()}
    path = root / "data" / "results" / device / "full" / f"{offload_claims.OFFLOAD}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"source_hash": "x", "results": found}))


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [({}, F), ({"step/torchao/fp32": 1.7, "step/host/fp32": 1.25}, P), ({"step/torchao/fp32": 1.7}, N)],
)
def test_the_slowdown_is_judged_on_a_gpu(root: Path, changed: dict[str, float], wanted: str) -> None:
    put(root, "cuda", changed)
    found = verdict("S1-007")
    assert found.verdict == wanted and found.evidence[0].view == "cuda:full"


def test_a_cpu_decides_nothing_of_it(root: Path) -> None:
    put(root, "cpu", {})
    assert verdict("S1-007").verdict == ledger.NOT_MEASURED


def test_the_documents_own_methods_count(root: Path) -> None:
    assert verdict("S1-002").verdict == N and "S1-012" in verdict("S1-002").condition
    path = root / "data" / "claims.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("8-bit optimizer", "paged optimizer"), encoding="utf-8")
    assert verdict("S1-002").verdict == F
    assert verdict("S1-004").verdict == ledger.NOT_CHECKABLE

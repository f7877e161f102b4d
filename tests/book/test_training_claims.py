"""Each rule over the training chapters can be turned by other results."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tq.book import claims, distributed_claims, ledger, memory_claims, training_claims  # noqa: E402

FEEDBACK = {"exact": 2.4, "gradient": 0.01, "gradient-ef": 0.0, "published-gradient": 0.2, "published-gradient-ef": 0.7}
RESULTS = {
    training_claims.ADAMW: {
        **{f"feedback/128/{name}": value for name, value in FEEDBACK.items()},
        "drift/published-v3": 0.8,
        "gap/published-v3": 0.15,
        "gap-high/published-v3": 0.2,
        "larger/gap": 0.001,
        "larger/half-width": 0.004,
        "frozen-v/4": 0.4,
        "gap/top-k-1pc": 0.4,
        "amp/bfloat16": 0.001,
        "amp/float16": 0.02,
        "drop-in/same-bits": True,
        "drop-in/takes-state": True,
    },
    memory_claims.MEMORY: {
        "ratio/tensor/bf16-scales": 3.88,
        "ratio/tensor/fp32-scales": 3.76,
        "ratio/4-bits": 4.2,
        "ratio/4-bits-recompute": 6.8,
        "gap-mean/4-bits": -0.001,
        "gap-mean/4-bits-recompute": 0.02,
        "compiled/per-tensor-bf16": 3.88,
        "compiled/per-tensor": 7.76,
        "share-of-memory/none/lowest": 0.56,
        "share-of-memory/none/highest": 0.80,
        "share-of-memory/selective/lowest": 0.17,
        "share-of-memory/selective/highest": 0.45,
        "checkpoint/blocks-reduction": 0.91,
        "checkpoint/blocks-factor": 9.0,
        "checkpoint/peak-at-16-times-the-depth": 7.0,
        "time/bare-checkpoint": 1.40,
        "attention/doubling/math": 3.8,
        "attention/doubling/fused": 2.0,
        "attention/fused-saves/512": 4.7,
        "attention/fused-saves/1024": 8.7,
        "attention/fused-saves/2048": 16.7,
    },
    distributed_claims.ALLREDUCE: {
        **{f"bytes/fewer/{m}/{n}": v for m, n, v in (("all-gather", 2, 7.5), ("all-gather", 8, 1.9))},
        **{f"bytes/fewer/ours/{n}": 7.5 for n in (2, 8)},
        "sparse/message": 500.0,
        "sparse/ranks-64": 15.6,
        "faster/ours/100/2/16mib": 7.2,
    },
    distributed_claims.TRAINING: {
        "gap/ddp-4": 0.001,
        "gap/ddp-4/half-width": 0.003,
        "gap/fsdp-4": 0.001,
        "gap/fsdp-4/half-width": 0.004,
        "share/ddp-fp32/100": 0.8,
        "share/ddp-fp32/1000": 0.3,
        "share/ddp-4/1000": 0.1,
        "faster/fsdp-4/100": 1.5,
        "sooner/ddp-4/100": 4.1,
        "whole/same-losses": True,
    },
    memory_claims.STATE: {
        "saving/8-8": 0.742,
        "saving/bitsandbytes-8-bit": 0.6,
        "saving/torchao-8-bit": 0.737,
        "whole/8-8": 1.59,
        "ratio/8-8": 3.88,
        "relative/8-8": 0.001,
        "relative-worst/8-8": 0.004,
        "relative/bitsandbytes-8-bit": 0.003,
        "relative-worst/bitsandbytes-8-bit": 0.02,
        "bytes/fp32": 8.0,
        "bytes/adafactor": 7.9,
        "bytes/sgd-with-momentum": 4.0,
    },
}

GPU = {
    training_claims.SCALE: {
        "gpt2-124m/published": 0.004,
        "gpt2-124m/published/largest-gap": 0.006,
        "gpt2-124m/published/at-a-third": 0.03,
        "gpt2-355m/at-a-third": 0.001,
        "gpt2-355m/gap": 0.001,
    }
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return h.claims_only(tmp_path, monkeypatch)


def put(root: Path, changed: dict[str, Any]) -> None:
    views = [("cpu", *entry) for entry in RESULTS.items()] + [("cuda", *entry) for entry in GPU.items()]
    for device, chapter, values in views:
        found = {
            key: {"value": changed.get(key, value), "unit": "1", "spread": "none", "n": 3}
            for key, value in values.items()
        }
        path = root / "data" / "results" / device / "full" / f"{chapter}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"source_hash": "x", "results": found}))


F, P, N = "reproduced", "partly", "not reproduced"
TURNS: list[tuple[str, dict[str, Any], str]] = [
    ("T-003", {}, P),
    ("T-003", {"feedback/128/gradient-ef": 0.6}, F),
    ("T-003", {"feedback/128/published-gradient-ef": 0.05}, N),
    ("T-004", {}, P),
    ("T-004", {"feedback/128/gradient": 0.6}, F),
    ("T-004", {"feedback/128/published-gradient": 0.05}, N),
    ("S0-050", {}, P),
    ("S0-050", {"feedback/128/gradient-ef": 0.6}, F),
    ("S0-050", {"feedback/128/published-gradient-ef": 0.05}, N),
    ("T-012", {}, N),
    ("T-012", {"gap/published-v3": 0.002}, P),
    ("T-012", {"drift/published-v3": 0.0}, F),
    ("T-005", {}, P),
    ("T-005", {"frozen-v/4": 3.0}, F),
    ("T-005", {"frozen-v/4": 0.01}, N),
    ("T-017", {}, P),
    ("T-017", {"amp/float16": 0.0}, F),
    ("T-017", {"amp/bfloat16": 0.3}, N),
    ("S0-051", {}, P),
    ("S0-051", {"amp/float16": 0.0}, F),
    ("S0-051", {"amp/bfloat16": 0.3}, N),
    ("T-021", {}, F),
    ("T-021", {"drop-in/takes-state": False}, P),
    ("T-021", {"drop-in/takes-state": False, "drop-in/same-bits": False}, N),
    ("T-007", {}, P),
    ("T-007", {"gpt2-124m/published": -0.001}, F),
    ("T-007", {"gpt2-124m/published": 0.03}, N),
    ("T-006", {}, P),
    ("T-006", {"gpt2-124m/published/at-a-third": 0.0194}, F),
    ("T-006", {"gpt2-124m/published/at-a-third": 0.2}, N),
    ("T-008", {}, P),
    ("T-008", {"gpt2-124m/published/at-a-third": 0.001}, F),
    ("T-008", {"gpt2-355m/at-a-third": 0.004}, N),
    ("T-010", {}, P),
    ("T-010", {"gpt2-124m/published/largest-gap": 0.002}, F),
    ("T-010", {"gpt2-124m/published/largest-gap": 0.05}, N),
    *(
        (name, changed, wanted)
        for name in ("S0-064", "S0-003")
        for changed, wanted in (
            ({}, P), ({"gpt2-124m/published": 0.001}, F), ({"gpt2-355m/gap": 0.01}, N)
        )
    ),
    ("S0-063", {}, P),
    ("S0-063", {"gap-high/published-v3": 0.002}, F),
    ("S0-063", {"larger/gap": 0.02}, N),
    ("S0-002", {}, P),
    ("S0-002", {"ratio/tensor/bf16-scales": 4.1}, F),
    ("S0-002", {"gap-mean/4-bits": 0.03}, N),
    ("T-016", {}, P),
    ("T-016", {"compiled/per-tensor-bf16": 4.1}, F),
    ("T-016", {"compiled/per-tensor": 3.0}, N),
    ("S0-014", {}, P),
    ("S0-014", {f"share-of-memory/{k}/{e}": 0.5 for k in ("none", "selective") for e in ("lowest", "highest")}, F),
    ("S0-014", {f"share-of-memory/{k}/{e}": 0.2 for k in ("none", "selective") for e in ("lowest", "highest")}, N),
    ("S1-010", {}, P),
    ("S1-010", {"checkpoint/blocks-reduction": 0.7}, F),
    ("S1-010", {"checkpoint/blocks-reduction": 0.3}, N),
    *(
        (name, {"time/bare-checkpoint": time}, wanted)
        for name, near in (("S1-011", 1.27), ("S3-027", 1.27), ("S4-058", 1.34))
        for time, wanted in ((near, F), (1.44, P), (1.9, N))
    ),
    ("S3-049", {}, P),
    ("S3-049", {"checkpoint/blocks-factor": 11.0, "time/bare-checkpoint": 1.33}, F),
    ("S3-049", {"checkpoint/blocks-factor": 3.0}, N),
    ("S4-059", {}, P),
    ("S4-059", {"checkpoint/peak-at-16-times-the-depth": 3.8}, F),
    ("S4-059", {"checkpoint/peak-at-16-times-the-depth": 14.0}, N),
    *(
        (name, changed, wanted)
        for name in ("S4-063", "S3-053")
        for changed, wanted in (
            ({}, P), ({"attention/doubling/fused": 3.9}, F), ({"attention/doubling/math": 2.1}, N)
        )
    ),
    ("S3-047", {}, P),
    ("S3-047", {f"attention/fused-saves/{t}": 12.0 for t in (512, 1024, 2048)}, F),
    ("S3-047", {f"attention/fused-saves/{t}": 2.0 for t in (512, 1024, 2048)}, N),
    ("S1-012", {}, P),
    ("S1-012", {"saving/bitsandbytes-8-bit": None}, F),
    ("S1-012", {f"saving/{name}": 0.5 for name in memory_claims.EIGHT}, N),
    ("S1-013", {}, P),
    ("S1-013", {"relative-worst/bitsandbytes-8-bit": 0.006}, F),
    ("S1-013", {"relative/8-8": 0.03, "relative/bitsandbytes-8-bit": 0.03}, N),
    ("S4-067", {}, P),
    ("S4-067", {"ratio/8-8": 2.05}, F),
    ("S4-067", {"ratio/8-8": 1.5}, N),
    ("S4-068", {}, P),
    ("S4-068", {"bytes/adafactor": 0.05}, F),
    ("S4-068", {"bytes/adafactor": 8.0, "bytes/sgd-with-momentum": 8.0}, N),
    ("S0-017", {}, P),
    ("S0-017", {"bytes/fewer/all-gather/8": 7.4}, F),
    ("S0-017", {"bytes/fewer/ours/8": 2.0}, N),
    ("S3-029", {}, P),
    ("S3-029", {"gap/top-k-1pc": 0.001}, F),
    ("S3-029", {"sparse/message": 100.0}, N),
    ("S4-100", {}, F),
    ("S4-100", {"gap/ddp-4": 0.2}, P),
    ("S4-100", {"gap/ddp-4": 0.2, "bytes/fewer/ours/2": 2.0, "faster/ours/100/2/16mib": 1.1}, N),
    ("S4-046", {}, P),
    ("S4-046", {"share/ddp-fp32/100": 0.02, "share/ddp-fp32/1000": 0.01, "share/ddp-4/1000": 0.0}, F),
    ("S4-046", {"share/ddp-4/1000": 0.7}, N),
    *(
        (name, changed, wanted)
        for name in ("S0-059", "T-020")
        for changed, wanted in (({}, P), ({"gap/fsdp-4": 0.3}, F), ({"faster/fsdp-4/100": 5.0}, N))
    ),
    ("T-019", {}, P),
    ("T-019", {"whole/same-losses": False}, F),
    ("T-019", {"sooner/ddp-4/100": 30.0}, N),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "wanted"), TURNS)
def test_each_rule_follows_the_results(root: Path, name: str, changed: dict[str, Any], wanted: str) -> None:
    put(root, changed)
    found = next(v for v in claims.verdicts() if v.id == name)
    assert found.verdict == wanted, found.condition
    chapter = found.evidence[0].chapter
    assert chapter in RESULTS | GPU and found.evidence[0].view == ("cuda:full" if chapter in GPU else "cpu:full")


def test_every_rule_is_turned_three_ways_and_waits_for_its_results(root: Path) -> None:
    rules = {**training_claims.RULES, **memory_claims.RULES, **distributed_claims.RULES}
    assert {name for name, _, _ in TURNS} == set(rules)
    for name in rules:
        assert len({wanted for turned, _, wanted in TURNS if turned == name}) == 3
        assert next(v for v in claims.verdicts() if v.id == name).verdict == ledger.NOT_MEASURED

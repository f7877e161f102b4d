"""Rules over activation-memory."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import activation_memory as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
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
        "step/checkpoint-of-every-block": 1.40,
        "attention/doubling/math": 3.8,
        "attention/doubling/fused": 2.0,
        "attention/fused-saves/512": 4.7,
        "attention/fused-saves/1024": 8.7,
        "attention/fused-saves/2048": 16.7,
    },
}
TURNS: list[s.Turn] = [
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
        (name, {"step/checkpoint-of-every-block": time}, wanted)
        for name, near in (("S1-011", 1.27), ("S3-027", 1.27), ("S4-058", 1.34))
        for time, wanted in ((near, F), (1.44, P), (1.9, N))
    ),
    ("S3-049", {}, P),
    ("S3-049", {"checkpoint/blocks-factor": 20.0, "step/checkpoint-of-every-block": 1.33}, F),
    ("S3-049", {"checkpoint/blocks-factor": 20.0, "step/checkpoint-of-every-block": 1.11}, P),
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
]  # fmt: skip
BY_HAND = {
    "S3-050": (32 / 16, 16 / 16),
    "S4-055": (12,),
    "S4-056": (12, 16),
    "S4-057": (1.12, 0.84),
    "S4-058": (33.33, 22.22),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

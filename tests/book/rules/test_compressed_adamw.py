"""Rules over compressed-adamw."""

from pathlib import Path

import pytest

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, L, N, P, U
from tq.book.claims.rules import compressed_adamw as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "amp/bfloat16": (0.001, -0.002, 0.004),
        "amp/float16": (0.002, -0.001, 0.005),
        "drop-in/same-bits": True,
        "drop-in/takes-state": True,
        "steps": 400,
        "gradient-4-4/gap": (0.0, -0.005, 0.005),
    },
}
TURNS: list[s.Turn] = [
    ("S0-051", {}, F),
    ("S0-051", {"amp/float16": (0.002, -0.011, 0.015)}, U),
    ("S0-051", {"amp/bfloat16": (0.009, 0.005, 0.013)}, U),
    ("S0-051", {"amp/float16": (0.03, 0.02, 0.04)}, P),
    ("S0-051", {f"amp/{kind}": (0.03, 0.02, 0.04) for kind in ("bfloat16", "float16")}, N),
    ("T-021", {}, P),
    ("T-021", {"drop-in/takes-state": False}, P),
    ("T-021", {"drop-in/same-bits": False}, P),
    ("T-021", {"drop-in/takes-state": False, "drop-in/same-bits": False}, N),
    ("S0-058", {}, L),
]  # fmt: skip
#: One: a limit stays one. Two: theirs cannot be tried. Four: an
#: interval can reach beyond the margin.
FEWER = {"S0-058": 1, "T-021": 2, "S0-051": 4}

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer=FEWER
)


@pytest.mark.parametrize(
    ("steps", "gap", "first"),
    [
        (400, (0.0, -0.005, 0.005), "Stands"),
        (80_000, (0.0, -0.005, 0.005), "Stands"),
        (100_000, (0.0, -0.02, 0.02), "Stands"),
        (100_000, (0.0, -0.005, 0.005), "Lifted here"),
    ],
)
def test_pairs_of_that_length_lift_the_limit(root: Path, steps: int, gap: tuple[float, ...], first: str) -> None:
    s.put(root, rules.CHAPTER, {**RESULTS[rules.CHAPTER], "steps": steps, "gradient-4-4/gap": gap})
    found = s.verdict("S0-058")
    assert found.condition.startswith(f"{first}: ") and f"{steps:,} steps" in found.condition
    assert all(check.holds for check in found.checks) == (first == "Lifted here")

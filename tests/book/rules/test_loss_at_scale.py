"""Rules over loss-at-scale: on a GPU, and over runs of a hundred thousand steps on a CPU."""

from pathlib import Path

import pytest

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, L, N, P
from tq.book.claims.rules import loss_at_scale as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "100k/4-bits/steps": 100_000,
        "100k/4-bits/gap": 0.002,
        "100k/4-bits/drift": 0.0,
        "100k/published/steps": 66_000,
    }
}
ON_GPU: dict[str, s.Values] = {
    rules.CHAPTER: {
        "124m/published/end": 0.004,
        "124m/published/largest-gap": 0.006,
        "124m/published/500": 0.03,
        "124m/frozen-v/end": 2.6,
        "124m/frozen-v/steps": 1500,
        "355m/4-bits/500": 0.001,
        "355m/4-bits/end": 0.001,
        "355m/published/500": 0.03,
        "355m/published/end": 0.004,
    },
}
TURNS: list[s.Turn] = [
    ("T-007", {}, P),
    ("T-007", {"124m/published/end": -0.001}, F),
    ("T-007", {"124m/published/end": 0.03}, N),
    ("T-006", {}, P),
    ("T-006", {"124m/published/500": 0.0194}, F),
    ("T-006", {"124m/published/500": 0.2}, N),
    ("T-008", {}, P),
    ("T-008", {"355m/published/500": 0.001}, F),
    ("T-008", {"355m/4-bits/500": 0.004}, N),
    ("T-010", {}, P),
    ("T-010", {"124m/published/largest-gap": 0.002}, F),
    ("T-010", {"124m/published/largest-gap": 0.05}, N),
    ("S0-003", {}, P),
    ("S0-003", {"355m/published/end": 0.001}, F),
    ("S0-003", {"355m/4-bits/end": 0.01}, N),
    ("S0-063", {}, P),
    ("S0-063", {"355m/published/end": 0.001}, F),
    ("S0-063", {"355m/4-bits/end": 0.01}, N),
    ("T-005", {}, P),
    ("T-005", {"124m/frozen-v/end": 0.6}, N),
    ("T-005", {"124m/frozen-v/end": 9.1}, F),
    ("T-005", {"124m/frozen-v/steps": 700}, F),
    ("S0-058", {}, L),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer={"S0-058": 1}, on_gpu=ON_GPU
)
POWER = 0.34 * 0.28 / (0.34 + 0.28)  # of compute, by which the reducible loss falls
BY_HAND = {"S4-154": (1e6**-POWER, 1, 2**POWER)}
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, "Stands; ours passes at 0.1 million parameters"),
        ({"100k/4-bits/steps": 80_000}, "Stands; ours fails at 0.1 million parameters"),
        ({"100k/4-bits/gap": -0.02}, "Stands; ours fails at 0.1 million parameters"),
        ({"100k/4-bits/drift": 1e-6}, "Stands; ours fails at 0.1 million parameters"),
    ],
)
def test_a_small_model_passes_the_limit(root: Path, changed: dict[str, float], first: str) -> None:
    s.put(root, rules.CHAPTER, {**RESULTS[rules.CHAPTER], **changed})
    found = s.verdict("S0-058")
    assert found.condition.startswith(f"{first}: ")
    assert all(check.holds for check in found.checks) == (first.startswith("Stands; ours passes"))

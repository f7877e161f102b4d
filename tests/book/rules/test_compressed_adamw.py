"""Rules over compressed-adamw."""

from pathlib import Path

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims import ledger
from tq.book.claims.rules import compressed_adamw as rules

FEEDBACK = {"exact": 2.4, "gradient": 0.01, "gradient-ef": 0.0, "published-gradient": 0.2, "published-gradient-ef": 0.7}
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **{f"feedback/128/{name}": value for name, value in FEEDBACK.items()},
        "drift/published-v3": 0.8,
        "gap/published-v3": 0.15,
        "gap-high/published-v3": 0.2,
        "larger/gap": 0.001,
        "larger/half-width": 0.004,
        "frozen-v/4": 0.4,
        "amp/bfloat16": 0.001,
        "amp/float16": 0.02,
        "drop-in/same-bits": True,
        "drop-in/takes-state": True,
        "steps": 400,
        "gap/gradient-4-4": (0.0, -0.005, 0.005),
    },
}
TURNS: list[s.Turn] = [
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
    ("S0-063", {}, P),
    ("S0-063", {"gap-high/published-v3": 0.002}, F),
    ("S0-063", {"larger/gap": 0.02}, N),
    ("S0-058", {"steps": 200_000}, F),
    ("S0-058", {"steps": 200_000, "gap/gradient-4-4": (0.0, -0.02, 0.02)}, P),
    ("S0-058", {"steps": 200_000, "gap/gradient-4-4": (0.05, 0.03, 0.07)}, N),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)


def test_a_short_run_measures_no_long_one(root: Path) -> None:
    s.put(root, rules.CHAPTER, RESULTS[rules.CHAPTER])
    found = s.verdict("S0-058")
    assert found.verdict == ledger.NOT_MEASURED and "400 steps, 0.4%" in found.condition

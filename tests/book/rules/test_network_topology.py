"""Rules over trees, rings and fat trees."""

from pathlib import Path

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import network_topology as rules

BY_HAND = {
    "S3-013": (900,),
    "S3-014": (8, 64, 1, 8),
    "S3-016": (1.0178, 555.7),  # 5.70 s over 5.60 s, 100.03 ms over 0.18 ms
    "S3-017": ((14, 9_999),),
    "S3-035": (40,),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


def test_thousands_are_a_lower_bound_of_the_steps_of_a_run(root: Path) -> None:
    found = s.verdict("S3-019")
    assert found.verdict == P and "has 350,000 all-reduces" in found.condition  # 1.4e12 tokens of 4e6 a step
    assert "Llama 3 405B 975,000" in found.condition  # 15.6e12 of 16e6
    assert [check.holds for check in found.checks] == [False, True] and found.evidence


RESULTS = {
    rules.CHAPTER: {
        "tree/opposite": 512.0, "tree/uniform": 256.0, "tree/neighbours": 1.0, "tree/share-for-100": 0.195,
        "load/100/constant": 0.995, "growth/hashed": 0.955, "growth/sprayed": 1.0, "growth/hashed-per-host": 0.43,
    }
}  # fmt: skip
test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS,
    [
        ("S3-010", {}, F), ("S3-010", {"tree/opposite": 1.0}, N),
        ("S3-011", {}, F), ("S3-011", {"tree/uniform": 20.0}, F),
        ("S3-011", {"tree/opposite": 60.0, "tree/uniform": 30.0}, N),
        ("S3-012", {}, F), ("S3-012", {"growth/hashed": 0.9}, P),
        ("S3-012", {"growth/hashed": 0.8, "growth/sprayed": 0.9}, N),
    ],
    fewer={"S3-010": 2, "S3-011": 2}, apart=("S3-019",),
)  # fmt: skip

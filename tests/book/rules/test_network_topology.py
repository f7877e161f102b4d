"""Rules over trees, rings and fat trees."""

from pathlib import Path

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import P
from tq.book.claims.rules import network_topology as rules

BY_HAND = {
    "S3-013": (900,),
    "S3-014": (8, 64, 1),
    "S3-016": (1.0178, 555.7),  # 5.70 s over 5.60 s, 100.03 ms over 0.18 ms
    "S3-017": ((14, 9_999),),
    "S3-035": ((50, 200),),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


def test_thousands_are_a_lower_bound_of_the_steps_of_a_run(root: Path) -> None:
    assert s.over_results(rules) == {"S3-019"}
    found = s.verdict("S3-019")
    assert found.verdict == P and "has 350,000 all-reduces" in found.condition  # 1.4e12 tokens of 4e6 a step
    assert "Llama 3 405B 975,000" in found.condition  # 15.6e12 of 16e6
    assert [check.holds for check in found.checks] == [False, True] and found.evidence

"""Formulas of trees, rings and fat trees."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import network_topology as rules

BY_HAND = {
    "S3-013": (900,),
    "S3-014": (8, 64, 1),
    "S3-016": (1.0178,),  # 5.70 s over 5.60 s
    "S3-017": ((14, 9_999),),
    "S3-035": ((50, 200),),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

"""Formulas of adapters."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import lab_e6 as rules

BY_HAND = {
    "S4-070": ((131_072, 16_777_216),),
    "S4-071": (128,),
    "S4-075": (0.175, 0.2188, 1.75),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

"""Formulas of number formats."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import lab_e4 as rules

BY_HAND = {
    "S4-065": ((2, 128),),  # 2^-2 over 2^-3; 57,344 over 448
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

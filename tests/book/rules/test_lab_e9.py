"""Formulas of serving."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import lab_e9 as rules

BY_HAND = {
    "S4-087": (2.684, 42.95),  # 327,680 bytes a token
    "S4-090": (8, 64),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

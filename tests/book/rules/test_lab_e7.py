"""Formulas of quantized weights."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import lab_e7 as rules

BY_HAND = {
    "S4-074": (3.879, 3.765),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

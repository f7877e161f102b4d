"""Formulas of the introductions."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import conclusion as rules

BY_HAND = {
    "S4-001": (8_473,),
    "S4-027": (6,),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

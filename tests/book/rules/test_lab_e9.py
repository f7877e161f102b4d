"""Formulas of serving."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import lab_e9 as rules

BY_HAND = {
    "S3-068": (1.907, 2.951, 3.749),
    "S4-064": (42.95, 343.6, 343.6),  # 327,680 bytes a token, and eight times as many
    "S4-087": (2.684, 21.47, 0.3355),
    "S4-090": (8,),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

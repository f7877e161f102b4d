"""Formulas of adapters."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import lab_e6 as rules

BY_HAND = {
    "S4-070": ((131_072, 16_777_216),),
    "S4-071": (128,),
    "S4-073": (0, 1 / 128),
    "S4-075": (0.175, 0.2188, 1.75),
    "S4-112": (1.895, 210.6),  # 1.62e19 operations at 2.375e15 per second; 405 * 4.127 / 8 + 1.6 GB
    "S4-134": (0,),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

"""Formulas of checkpoints and failures."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import checkpoints_and_failures as rules

BY_HAND = {
    "S2-001": (782.3, 840),
    "S2-002": (521.5, 560),
    "S2-003": (4, 1.333),
    "S2-004": (1.1265, 1.2096),
    # 4,860 GB at 5 GB/s; M = 50,677 / 128 hours, so sqrt(2 * 972 s / M) = 3.693 % are lost
    "S2-005": (218_972, 15_184),
    "S2-010": (419, 466),
    "S2-011": (19.27, 877.3),
    "S2-013": (66.67, 50),
    "S2-017": (7_715, 53.58),
    "S4-081": (11.84,),
    "S4-082": (5, 7),
    "S4-083": (19.27,),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

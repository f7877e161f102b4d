"""Formulas of budgets, of dollars per operation and of serving beside training."""

from tests.book.rules import scaffold as s
from tq.book.claims.rules import cost_of_scale as rules

HOUR = 3.99  # dollars, the median of eleven offers
BY_HAND = {
    "S4-014": (
        1e3 / 24 / HOUR, 1e5 / 16 / 24 / HOUR, 1e6 / 100 / 24 / HOUR, 1e8 / 1e4 / 24 / HOUR, 1e8 / 1e4 / 24 / HOUR,
        5e9 / 2.5e5 / 24 / HOUR,
    ),
    # B200 over H100 at RunPod's community, 2.69 and 5.98 dollars an hour
    "S4-156": (2250 / 989.5 * 2.69 / 5.98, 1 / 0.56, 2.95 / 3.85),
    "S4-114": (480 * 12 / 15 / 3, 45),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

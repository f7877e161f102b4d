"""The chance that MinHash finds a pair."""

import random

import pytest

from tests.book.rules import scaffold as s
from tq.book.claims.rules import lab_e1 as rules

BY_HAND = {"S4-150": (1 - (1 - 0.43047) ** 14, (1 - 1 / 256) ** 14)}  # 0.9^8 = 0.43047

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


def test_the_chance_is_that_of_hashes_that_are_drawn() -> None:
    draw = random.Random(0)
    hits = sum(
        any(all(draw.random() < 0.7 for _ in range(rules.ROWS)) for _ in range(rules.BANDS)) for _ in range(4000)
    )
    assert hits / 4000 == pytest.approx(rules.found(0.7), abs=0.03)
    assert rules.found(0.0) == 0 and rules.found(1.0) == 1

"""Weights in few bits: what turns each rule."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import lab_e8 as rules

BOOK, SMOLLM = (f"rise/{model}/round-to-nearest/8" for model in rules.MODELS)
LOOP, AFTER = "loop/in-the-loop", "loop/rounded-afterwards"
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {BOOK: 0.001, SMOLLM: 0.002, LOOP: (3.6, 3.55, 3.65), AFTER: (3.8, 3.75, 3.85)},
}
TURNS: list[s.Turn] = [
    ("S4-139", {}, F),
    ("S4-139", {BOOK: 0.02}, P),
    ("S4-139", {BOOK: 0.02, SMOLLM: 0.02}, N),
    ("S4-140", {}, F),
    ("S4-140", {LOOP: (3.79, 3.74, 3.84)}, P),
    ("S4-140", {LOOP: (3.9, 3.85, 3.95)}, N),
]

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

"""Formulas of serving, and what turns the rule over the cache."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import lab_e9 as rules

BY_HAND = {
    "S3-072": (100 * (1 - 12.88 / 46.70), 100 * 0.75**32 * 45.10 / 46.70, 71.16),  # read twice, then computed
    "S4-087": (2.684, 42.95),  # 327,680 bytes a token
    "S4-090": (8, 64),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

BF16, CODED, COST = "held/bf16", "held/4-and-3-bits", "both/smollm2/k4v3"
SAME, KEPT = "drafts/{}/same", "drafts/{}/kept"
GUESSED = s.every(SAME, rules.DRAFTS, 6.0) | s.every(KEPT, rules.DRAFTS, 0.6) | {"drafts/3/prompts": 6.0}
RESULTS: dict[str, s.Values] = {rules.CHAPTER: {BF16: 189.0, CODED: 44.0, COST: 0.03} | GUESSED}
TURNS: list[s.Turn] = [
    ("S4-141", {}, F),
    ("S4-141", {COST: 0.2}, P),
    ("S4-141", {CODED: 150.0, COST: 0.2}, N),
    ("S4-155", {}, F),
    ("S4-155", {SAME.format(2): 5.0}, P),
    ("S4-155", {KEPT.format(3): 1.0}, P),
    ("S4-155", {SAME.format(2): 5.0, KEPT.format(3): 0.0}, N),
]

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

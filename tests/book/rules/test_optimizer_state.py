"""Rules over optimizer-state."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import optimizer_state as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "saving/8-8": 0.742,
        "saving/bitsandbytes-8-bit": 0.6,
        "saving/torchao-8-bit": 0.737,
        "whole/8-8": 1.59,
        "ratio/8-8": 3.88,
        "relative-worst/8-8": 0.004,
        "relative-worst/bitsandbytes-8-bit": 0.02,
        "relative-worst/torchao-8-bit": 0.005,
        "bytes/fp32": 8.0,
        "bytes/adafactor": 7.9,
        "bytes/bitsandbytes-lion": 4.0,
    },
}
TURNS: list[s.Turn] = [
    ("S1-012", {}, P),
    ("S1-012", {"saving/bitsandbytes-8-bit": 0.72}, F),
    ("S1-012", {"saving/bitsandbytes-8-bit": None}, F),
    ("S1-012", {f"saving/{name}": 0.5 for name in rules.EIGHT}, N),
    ("S1-013", {}, P),
    ("S1-013", {"relative-worst/bitsandbytes-8-bit": 0.006}, F),
    ("S1-013", {f"relative-worst/{name}": 0.03 for name in rules.EIGHT}, N),
    # "~2x" may be off by a fifth; the list takes 12 / (4 + 8 / ratio)
    ("S4-067", {}, P),  # the list alone, 1.98 times
    ("S4-067", {"ratio/8-8": 2.05}, P),  # the state alone: the list 1.52 times
    ("S4-067", {"ratio/8-8": 2.35, "whole/8-8": 1.7}, F),  # the list 1.62 times
    ("S4-067", {"ratio/8-8": 1.5}, N),  # the list 1.29 times
    ("S4-068", {}, P),
    ("S4-068", {"bytes/adafactor": 0.05}, F),
    ("S4-068", {"bytes/bitsandbytes-lion": 8.0}, N),
    ("S4-068", {"bytes/bitsandbytes-lion": None}, N),
]  # fmt: skip
BY_HAND = {
    "S4-066": (8,),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

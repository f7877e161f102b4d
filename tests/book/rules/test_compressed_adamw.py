"""Rules over compressed-adamw."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, U
from tq.book.claims.rules import compressed_adamw as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "amp/bfloat16": (0.001, -0.002, 0.004),
        "amp/float16": (0.002, -0.001, 0.005),
        "amp/bfloat16/p": 0.1,
        "amp/float16/p": 0.08,
        "drop-in/same-bits": True,
        "drop-in/takes-state": True,
    },
}
TURNS: list[s.Turn] = [
    ("S0-051", {}, F),
    ("S0-051", {"amp/float16": (0.002, -0.011, 0.015)}, U),
    ("S0-051", {"amp/bfloat16": (0.009, 0.005, 0.013)}, U),
    ("S0-051", {"amp/float16": (0.03, 0.02, 0.04)}, P),
    ("S0-051", {f"amp/{kind}": (0.03, 0.02, 0.04) for kind in ("bfloat16", "float16")}, N),
    ("T-021", {}, P),
    ("T-021", {"drop-in/takes-state": False}, P),
    ("T-021", {"drop-in/same-bits": False}, P),
    ("T-021", {"drop-in/takes-state": False, "drop-in/same-bits": False}, N),
]  # fmt: skip
#: Two: theirs cannot be tried. Four: an interval can reach beyond the margin.
FEWER = {"T-021": 2, "S0-051": 4}

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer=FEWER
)

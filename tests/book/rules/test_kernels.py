"""Rules over kernels."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import kernels as rules

SIZES = ("124m", "355m", "7b", "70b")
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **dict(zip((f"step/report/{size}" for size in SIZES), (3.5, 5.9, 10.8, 11.3), strict=True)),
        "parity/decimals": 6.8,
        "parity/bytes-that-differ": 1e-6,
    },
}
ON_GPU: dict[str, s.Values] = {rules.ON_A_GPU: {"step/ddp-hook-of-4-bits": 2.5}}
TURNS: list[s.Turn] = [
    ("S0-057", {}, P),
    ("S0-057", s.every("step/report/{}", SIZES, 3.0), F),
    ("S0-057", {"step/report/124m": 5.0}, N),
    ("T-015", {}, P),
    ("T-015", {"parity/bytes-that-differ": 0.0}, F),
    ("T-015", {"parity/decimals": 4.0}, N),
]  # fmt: skip
BY_HAND = {
    "T-014": (7.758, 7.529),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, on_gpu=ON_GPU
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

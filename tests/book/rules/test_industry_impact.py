"""Rules over industry-impact."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import industry_impact as rules

SHARDED, WHOLE = "startup/saving/400g", "startup/saving-whole/400g"
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "provider/saving-at-their-prices": 0.13,
        "provider/network-share": (0.15, 0.09, 0.20),
        SHARDED: 0.02,
        WHOLE: 0.03,
        "startup/saving/100g": 0.09,
        "provider/time/100g/plain": 1.18, "provider/time/100g/gradients": 1.09, "provider/time/25g/gradients": 1.5,
        **{f"startup/api/{name}": b for name, b in (("input", 1.2), ("output", 0.3), ("70b", 4.9))},
    },
}
TURNS: list[s.Turn] = [
    # 30 % less a tenth
    ("S0-052", {}, N),
    ("S0-052", {"provider/network-share": (0.2, 0.1, 0.28)}, P),
    ("S0-052", {"provider/saving-at-their-prices": 0.15}, P),  # a network that costs nothing would save 28 %
    ("S0-052", {"provider/saving-at-their-prices": 0.28}, F),
    ("S0-053", {}, N),
    ("S0-053", {"startup/saving/100g": 0.5}, N),  # of a network that nobody rents out
    ("S0-053", {WHOLE: 0.4}, F),
    ("S0-053", {SHARDED: 0.4}, F),
    # twice, less a tenth: a saving of 4 / 9
    ("S0-054", {}, N),
    ("S0-054", {WHOLE: 0.43}, N),
    ("S0-054", {WHOLE: 0.46}, F),
    ("S0-071", {}, N),
    ("S0-071", {"provider/time/100g/plain": 1.3}, P),
    ("S0-071", {"provider/time/100g/plain": 1.6}, F),
    ("S0-071", {"provider/time/100g/gradients": 1.3}, N),
    # between 100 million and a billion tokens, each a tenth wider
    ("S3-066", {}, F),
    ("S3-066", {"startup/api/input": 0.05}, P),
    ("S3-066", {f"startup/api/{name}": 0.05 for name in ("input", "output", "70b")}, N),
]
#: Two: one comparison alone.
FEWER = {"S0-053": 2, "S0-054": 2}
BY_HAND = {
    "S3-067": ((12.88, 46.7),),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer=FEWER
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

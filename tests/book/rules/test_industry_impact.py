"""Rules over industry-impact."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import industry_impact as rules

BEST = "startup/saving-whole"
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "provider/saving-at-their-prices": 0.13,
        "provider/network-share": (0.15, 0.09, 0.20),
        **{f"startup/saving/{t}": s for t, s in (("400g", 0.02), ("100g", 0.09), ("25g", 0.25))},
        **{f"startup/saving-whole/{t}": s for t, s in (("400g", 0.03), ("100g", 0.15), ("25g", 0.45))},
        **{f"startup/api/{name}": b for name, b in (("input", 1.2), ("output", 0.3), ("70b", 4.9))},
    },
}
TURNS: list[s.Turn] = [
    ("S0-052", {}, N),
    ("S0-052", {"provider/network-share": (0.2, 0.1, 0.35)}, P),
    ("S0-052", {"provider/saving-at-their-prices": 0.31}, F),
    ("S0-053", {}, P),
    ("S0-053", {f"{BEST}/25g": 0.2}, N),
    ("S0-053", {f"{BEST}/{t}": 0.4 for t in rules.TIERS}, F),
    ("S0-054", {}, N),
    ("S0-054", {f"{BEST}/25g": 0.6}, P),
    ("S0-054", {f"{BEST}/{t}": 0.5 for t in rules.TIERS}, F),
    ("S3-066", {}, P),
    ("S3-066", {"startup/api/input": 2.0}, N),
    ("S3-066", {f"startup/api/{name}": 1.1 for name in ("input", "output", "70b")}, F),
]  # fmt: skip
BY_HAND = {
    "S3-067": ((12.88, 46.7),),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

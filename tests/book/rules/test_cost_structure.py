"""Rules over cost-structure."""

from pathlib import Path

from tests.book import helpers as h
from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, X, ends, three
from tq.book.claims.rules import cost_structure as rules


def price(column: str, low: float, high: float) -> dict[str, float]:
    return {**ends(f"price/{column}", low, high), f"price/{column}/offers": 3}


RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **price("h100/major", 6.88, 12.29), **price("h100/specialised", 2.69, 6.16), **price("h100/spot", 2.46, 6.57),
        **price("a100/major", 3.43, 3.43), **price("a100/specialised", 1.39, 2.79), **price("a100/spot", 1.21, 1.21),
        "quote/h100-spot": 0.52, **three("on-demand/h100", 2.69, 3.99, 12.29), **ends("on-demand/h200", 3.59, 6.30),
        **ends("row/7b/implied", 2.33, 11.63), **ends("row/70b/implied", 9.30, 17.44),
        **ends("row/175b/implied", 0.34, 0.79), **ends("row/frontier/implied", 8.56, 20.55),
        **ends("row/7b/hours", 21504, 43008), **ends("row/70b/hours", 129024, 344064),
        **ends("row/175b/hours", 1.46e6, 5.84e6), **ends("row/frontier/hours", 2.92e6, 5.84e6),
        **ends("needed/7b/20-a-parameter", 3593, 9864), **ends("needed/7b/llama-2", 51335, 140917),
        **ends("needed/70b/20-a-parameter", 359344, 986420), **ends("needed/70b/llama-2", 513349, 1.409e6),
        **ends("needed/175b/20-a-parameter", 2.25e6, 6.17e6), **ends("needed/175b/gpt-3", 192506, 528439),
        **ends("needed/frontier/llama-3.1-405b", 23.2e6, 63.7e6),
        **ends("cost/gpt-4", 75, 206), **ends("cost/l2-7b", 0.26, 0.63), **ends("cost/l2-70b", 2.39, 5.9),
        **ends("cost/l31-hours-70b", 18.8, 86), **ends("cost/l31-hours-405b", 83, 379),
        "textbook/gpu-hours": 6e7, **three("textbook/flops", 3.6e25, 6.6e25, 9.8e25),
        **three("textbook/usd", 161, 239, 737), **three("textbook/weeks-on-eight-4090", 11, 17, 31),
        "textbook/orders-gpt-3-to-405b": 2.08, "peak/v100-32gb": 125.0, "peak/a100-80gb": 312.0,
        **ends("realised", 0.17, 0.46),
        **ends("peak-step", 2.27, 3.17), **ends("textbook/lost-day", 1.6, 7.4),
        **ends("textbook/usd-for-1e26", 164, 2062),
    },
}  # fmt: skip
TURNS: list[s.Turn] = [
    ("S0-020", {}, F),
    ("S0-020", {"price/h100/major/high": 10.0}, P),
    ("S0-020", ends("price/h100/major", 20, 30), N),
    ("S0-021", {}, P),
    ("S0-021", ends("price/h100/specialised", 1.9, 3.5), F),
    ("S0-021", ends("price/h100/specialised", 4, 6), N),
    ("S0-022", {}, P),
    ("S0-022", {"price/h100/spot/low": 1.05}, F),
    ("S0-022", {"quote/h100-spot": 1.3}, N),
    ("S0-023", {}, P),
    ("S0-023", ends("price/a100/major", 3.4, 5.6), F),
    ("S0-023", ends("price/a100/major", 1, 2), N),
    ("S0-024", {}, P),
    ("S0-024", ends("price/a100/specialised", 1.3, 2.1), F),
    ("S0-024", ends("price/a100/specialised", 2.5, 2.8), N),
    ("S0-025", {}, X),
    ("S0-025", {"price/a100/spot/low": 0.7}, F),
    ("S0-025", {"price/a100/spot/low": 0.9}, P),
    ("S0-026", {}, F),
    ("S0-026", {"row/7b/implied/high": 13.0}, P),
    (
        "S0-026",
        {
            **ends("row/7b/implied", 0.1, 0.2),
            **ends("needed/7b/20-a-parameter", 1, 2),
            **ends("needed/7b/llama-2", 1, 2),
        },
        N,
    ),
    ("S0-027", {}, F),
    ("S0-027", ends("row/7b/hours", 100, 200), N),
    ("S0-027", ends("row/7b/hours", 100, 5000), P),
    ("S0-028", {}, P),
    ("S0-028", {"row/70b/implied/high": 12.0}, F),
    ("S0-028", ends("row/70b/implied", 14, 20), P),
    (
        "S0-028",
        {
            **ends("row/70b/implied", 14, 20),
            **ends("needed/70b/20-a-parameter", 1, 2),
            **ends("needed/70b/llama-2", 1, 2),
        },
        N,
    ),
    ("S0-029", {}, N),
    ("S0-029", ends("row/70b/hours", 4e5, 9e5), F),
    ("S0-029", ends("row/70b/hours", 1e5, 9e5), P),
    ("S0-030", {}, P),
    ("S0-030", ends("needed/175b/gpt-3", 2e6, 3e6), N),
    ("S0-030", ends("row/175b/implied", 2, 4), F),
    ("S0-031", {}, P),
    ("S0-031", ends("row/175b/hours", 2e5, 5e6), F),
    ("S0-031", ends("row/175b/hours", 1e7, 2e7), N),
    ("S0-032", {}, P),
    ("S0-032", ends("needed/frontier/llama-3.1-405b", 6e7, 9e7), N),
    ("S0-032", {"on-demand/h200/high": 10.0}, P),
    ("S0-032", {"on-demand/h200/high": 25.0}, F),
    ("S0-033", {}, N),
    ("S0-033", ends("row/frontier/hours", 25e6, 50e6), F),
    ("S0-033", ends("row/frontier/hours", 5e6, 50e6), P),
    ("S3-001", {}, F),
    ("S3-001", ends("cost/gpt-4", 120, 300), P),
    ("S3-001", ends("cost/gpt-4", 250, 300), N),
    ("S3-059", {}, P),
    ("S3-059", ends("cost/l2-7b", 0.1, 0.3), F),
    ("S3-059", {**ends("needed/7b/20-a-parameter", 1e5, 2e5), **ends("cost/l2-7b", 1, 2)}, N),
    ("S3-060", {}, P),
    ("S3-060", ends("cost/l31-hours-70b", 4, 9), F),
    ("S3-060", ends("cost/l2-70b", 8, 9), N),
    ("S3-061", {}, F),
    ("S3-061", ends("cost/l31-hours-405b", 10, 40), P),
    ("S3-061", ends("cost/l31-hours-405b", 10, 20), N),
    ("S4-002", {}, F),
    ("S4-002", {"textbook/gpu-hours": 5e7}, P),
    ("S4-002", {"textbook/gpu-hours": 1e7}, N),
    ("S4-003", {}, P),
    ("S4-003", {"textbook/flops/high": 1.2e26}, F),
    ("S4-003", {"textbook/flops/mid": 1e25}, N),
    ("S4-004", {}, N),
    ("S4-004", {"textbook/usd/high": 900}, P),
    ("S4-004", {"textbook/usd/mid": 900}, F),
    ("S4-010", {}, P),
    ("S4-010", {"textbook/weeks-on-eight-4090/mid": 5}, F),
    ("S4-010", {"textbook/weeks-on-eight-4090/low": 20}, N),
    ("S4-017", {}, N),
    ("S4-017", {"textbook/orders-gpt-3-to-405b": 2.5}, P),
    ("S4-017", {"textbook/orders-gpt-3-to-405b": 2.9}, F),
    ("S3-004", {}, P),
    ("S3-004", {"realised/high": 0.335}, N),
    ("S3-004", {"realised/low": 0.34}, N),
    ("S4-030", {}, F),
    ("S4-030", {"peak/v100-32gb": 120.0}, P),
    ("S4-030", {"peak/v100-32gb": 80.0}, N),
    ("S4-031", {}, F),
    ("S4-031", {"peak/a100-80gb": 300.0}, P),
    ("S4-031", {"peak/a100-80gb": 624.0}, N),
    ("S4-036", {}, F),
    ("S4-036", {"peak-step/high": 5.0}, P),
    ("S4-036", ends("peak-step", 1.2, 5.0), N),
    ("S4-084", {}, F),
    ("S4-084", {"textbook/lost-day/low": 0.5}, P),
    ("S4-084", ends("textbook/lost-day", 0.1, 0.5), N),
    ("S4-095", {}, F),
    ("S4-095", {"textbook/usd-for-1e26/low": 50}, P),
    ("S4-095", ends("textbook/usd-for-1e26", 10, 50), N),
]  # fmt: skip
#: Two verdicts: the account agrees with itself.
FEWER = {"S3-004": 2}
BY_HAND = {
    "S1-016": (6.304,),
    "S3-038": (2.028, 267.6),  # 128 * 8 * 1.98e9
    "S3-040": (33.45, 19.49),
    "S3-043": (1, 1.117),
    "S3-044": (307.2,),
    "S3-045": (7.45, 14.9),
    "S4-005": (810,),
    "S4-006": (208.9, 215.2),
    "S4-007": (101.2, 202.3, 809.2),  # 126 * r * 100,352
    "S4-008": (640,),
    "S4-009": (70.42, 112),
    "S4-012": (4.201, 6.115),  # 6.67e25 / 4.2e21; 1e9 / 766
    "S4-033": ((989.5, 1979),),
    "S4-034": (141,),
    "S4-042": (3.35,),
    "S4-044": (0.9895,),
    "S4-078": (1.4,),
    "S4-079": (60,),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer=FEWER
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


def test_the_months_are_those_of_the_prices(root: Path) -> None:
    s.put(root, rules.CHAPTER, RESULTS[rules.CHAPTER])
    assert "the snapshot (August to November 2026)" in s.verdict("S0-020").condition
    rows = h.write(root / "data" / "prices.csv", "provider,date\na,2026-12-30\nb,2027-01-02\n")
    assert "the snapshot (December 2026 to January 2027)" in s.verdict("S0-025").condition
    rows.write_text("provider,date\na,2027-01-02\n")
    assert "the snapshot (January 2027)" in s.verdict("S0-025").condition

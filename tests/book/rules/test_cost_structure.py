"""Rules over cost-structure."""

from pathlib import Path

from tests.book import helpers as h
from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, U, X, ends, three
from tq.book.claims.rules import cost_structure as rules


def price(column: str, low: float, high: float) -> dict[str, float]:
    return {**ends(f"price/{column}", low, high), f"price/{column}/offers": 3}


RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **price("h100/major", 6.88, 12.29), **price("h100/specialised", 2.69, 6.16), "price/h100/spot/low": 2.46,
        **price("a100/major", 3.43, 3.43), **price("a100/specialised", 1.39, 2.79), "price/a100/spot/low": 1.21,
        **three("on-demand/h100", 2.69, 3.99, 12.29), **three("on-demand/h200", 3.59, 4.5, 6.30),
        **ends("row/7b/implied", 2.33, 11.63), **ends("row/70b/implied", 9.30, 17.44),
        **ends("row/175b/implied", 0.34, 0.79),
        **ends("row/7b/hours", 21504, 43008), **ends("row/70b/hours", 129024, 344064),
        **ends("row/175b/hours", 1.46e6, 5.84e6), **ends("row/frontier/hours", 2.92e6, 5.84e6),
        **three("needed/7b/20-a-parameter", 3593, 5287, 9864), **three("needed/7b/llama-2", 51335, 75529, 140917),
        **three("needed/70b/20-a-parameter", 359344, 528706, 986420),
        **three("needed/70b/llama-2", 513349, 755295, 1.409e6),
        **ends("needed/175b/20-a-parameter", 2.25e6, 6.17e6), **three("needed/175b/gpt-3", 192506, 283236, 528439),
        **three("needed/frontier/llama-3.1-405b", 23.2e6, 34.2e6, 63.7e6),
        **three("cost/gpt-4", 75, 128, 206), **three("cost/l2-7b", 0.26, 0.41, 0.63),
        **three("cost/l2-70b", 2.39, 3.86, 5.9), **three("cost/l31-hours-70b", 18.8, 27.9, 86),
        **three("cost/l31-hours-405b", 83, 123, 379), **three("textbook/usd", 161, 239, 737),
        "textbook/weeks-on-eight-4090/low": 11, "textbook/weeks-on-eight-4090/mid": 17,
        "textbook/orders-gpt-3-to-405b": 2.08, "peak/v100-32gb": 125.0, "peak/a100-80gb": 312.0,
        **ends("realised", 0.17, 0.46), **ends("peak-step", 2.27, 3.17), **ends("textbook/lost-day", 1.6, 7.4),
    },
}  # fmt: skip
TURNS: list[s.Turn] = [
    ("S0-020", {}, F),
    ("S0-020", {"price/h100/major/high": 10.0}, P),
    ("S0-020", ends("price/h100/major", 6.96, 12.29), P),  # a figure of three digits is held to a hundredth
    ("S0-020", ends("price/h100/major", 20, 30), X),  # prices of another month refute nothing
    ("S0-021", {}, P),  # the ranges meet, neither end agrees
    ("S0-021", ends("price/h100/specialised", 1.87, 3.44), F),
    ("S0-021", ends("price/h100/specialised", 4, 6), X),
    ("S0-022", {}, X),
    ("S0-022", {"price/h100/spot/low": 1.06}, X),  # 0.99 and a twentieth are 1.04
    ("S0-022", {"price/h100/spot/low": 1.0}, F),
    ("S0-023", {}, P),
    ("S0-023", ends("price/a100/major", 3.43, 5.78), F),
    ("S0-023", ends("price/a100/major", 1, 2), X),
    ("S0-024", {}, P),
    ("S0-024", ends("price/a100/specialised", 1.29, 2.06), F),
    ("S0-024", ends("price/a100/specialised", 2.5, 2.8), X),
    ("S0-025", {}, X),
    ("S0-025", {"price/a100/spot/low": 0.74}, F),
    ("S0-026", {}, P),  # 20 tokens a parameter cost $21,000, Llama 2's $301,000; both prices of its own are listed
    ("S0-026", three("needed/7b/20-a-parameter", 12_000, 20_000, 30_000), F),  # $79,800
    ("S0-026", {**three("needed/7b/20-a-parameter", 12_000, 20_000, 30_000), "row/7b/implied/high": 13.0}, P),
    *(  # nothing at the median price, and no price of its own; 10,000 hours at the dearest, $122,900, meet the range
        (
            "S0-026",
            {**ends("row/7b/implied", 0.1, 0.2), **three("needed/7b/20-a-parameter", 1, 2, 3),
             **three("needed/7b/llama-2", 1, 2, hours)},
            wanted,
        )
        for hours, wanted in ((10_000, P), (3000, N))
    ),
    ("S0-027", {}, P),  # fewer hours than Llama 2's, more than 20 tokens a parameter take
    ("S0-027", {"row/7b/hours/low": 5000}, F),
    ("S0-027", {"row/7b/hours/low": 10_000}, P),  # a tenth below it is inside the 80 % interval, and above the median
    ("S0-027", ends("row/7b/hours", 100, 200), N),
    ("S0-028", {}, P),  # $2.1M and $3.0M, and 17.44 dollars an hour are on no list of its own
    ("S0-028", {"row/70b/implied/high": 12.0}, F),
    (
        "S0-028",
        {
            **ends("row/70b/implied", 14, 20),
            **three("needed/70b/20-a-parameter", 1, 2, 3),
            **three("needed/70b/llama-2", 1, 2, 3),
        },
        N,
    ),
    ("S0-029", {}, P),  # 344,064 and a tenth are in the 80 % interval, and below the median
    ("S0-029", {"row/70b/hours/high": 320_000}, N),  # 352,000 are not
    ("S0-029", {"row/70b/hours/high": 490_000}, F),  # 539,000
    ("S0-029", ends("row/70b/hours", 1e6, 1.3e6), P),
    ("S0-030", {}, P),
    ("S0-030", ends("row/175b/implied", 2, 4), F),
    ("S0-030", three("needed/175b/gpt-3", 2e6, 2.5e6, 3e6), N),  # from $5.4M on
    ("S0-031", {}, P),
    ("S0-031", ends("row/175b/hours", 2e5, 5e6), F),
    ("S0-031", ends("row/175b/hours", 1e7, 2e7), N),
    ("S0-032", {}, P),  # $154M, and $83M at the cheapest
    ("S0-032", three("needed/frontier/llama-3.1-405b", 1e7, 2e7, 3e7), F),  # $90M
    ("S0-032", three("needed/frontier/llama-3.1-405b", 1e6, 5e6, 1e7), P),  # $22.5M, and $63M at the dearest
    ("S0-032", three("needed/frontier/llama-3.1-405b", 1e6, 2e6, 3e6), N),
    ("S0-033", {}, N),  # four times as many are needed
    ("S0-033", ends("row/frontier/hours", 1e7, 1.5e7), P),  # its plus sign
    ("S0-033", ends("row/frontier/hours", 2e7, 3e7), P),  # 33 of 34.2 million
    ("S0-033", ends("row/frontier/hours", 2e7, 4e7), F),
    ("S0-033", ends("row/frontier/hours", 8e7, 9e7), N),
    ("S3-001", {}, P),
    ("S3-001", {"cost/gpt-4/mid": 109}, F),
    ("S3-001", three("cost/gpt-4", 130, 200, 300), N),
    ("S3-059", {}, P),  # by 20 tokens a parameter: $9,700 to $121,000
    ("S3-059", three("cost/l2-7b", 0.1, 0.2, 0.3), F),
    ("S3-059", three("cost/l2-7b", 0.2, 0.4, 0.6), P),
    ("S3-059", three("needed/7b/20-a-parameter", 1e5, 1.5e5, 2e5), N),
    ("S3-060", {}, P),
    ("S3-060", three("cost/l31-hours-70b", 4, 5, 9), F),
    ("S3-060", three("cost/l2-70b", 8, 8.5, 9), N),
    ("S3-061", {}, P),  # $123M
    ("S3-061", three("cost/l31-hours-405b", 60, 90, 200), F),
    ("S3-061", three("cost/l31-hours-405b", 10, 20, 60), P),
    ("S3-061", three("cost/l31-hours-405b", 10, 15, 20), N),
    ("S4-004", {}, P),  # 737 + 99 of 800
    ("S4-004", {"textbook/usd/high": 600}, U),  # and data are not priced
    ("S4-004", three("textbook/usd", 1050, 1150, 1200), N),
    ("S4-004", {"textbook/usd/high": 850}, P),
    ("S4-004", {"textbook/usd/mid": 850, "textbook/usd/high": 1000}, F),
    ("S4-010", {}, P),
    ("S4-010", {"textbook/weeks-on-eight-4090/low": 4, "textbook/weeks-on-eight-4090/mid": 5}, F),
    ("S4-010", {"textbook/weeks-on-eight-4090/low": 20, "textbook/weeks-on-eight-4090/mid": 30}, N),
    ("S4-017", {}, N),
    ("S4-017", {"textbook/orders-gpt-3-to-405b": 2.9}, F),
    ("S3-004", {}, P),  # 31.9 % of the peak in 100 days, 35.4 % in 90
    ("S3-004", {"realised/high": 0.3}, N),
    ("S3-004", {"realised/low": 0.4}, N),
    ("S4-030", {}, F),
    ("S4-030", {"peak/v100-32gb": 101.0}, F),  # "~125" may be off by a fifth
    ("S4-030", {"peak/v100-32gb": 99.0}, N),
    ("S4-031", {}, F),
    ("S4-031", {"peak/a100-80gb": 624.0}, N),
    ("S4-036", {}, F),
    ("S4-036", {"peak-step/high": 5.0}, P),
    ("S4-036", ends("peak-step", 1.2, 5.0), N),
    ("S4-084", {}, F),
    ("S4-084", {"textbook/lost-day/low": 0.5}, F),  # some price is enough
    ("S4-084", ends("textbook/lost-day", 0.1, 0.5), N),
    ("S4-095", {}, F),
    ("S4-095", {"textbook/usd/low": 50}, P),
    ("S4-095", {"textbook/usd/low": 50, "textbook/usd/mid": 70}, N),
]  # fmt: skip
#: An offer at the price or none; an account of its maker's own; one comparison, or any that is enough.
FEWER = dict.fromkeys(("S0-022", "S0-025", "S3-004", "S4-017", "S4-030", "S4-031", "S4-084"), 2) | {"S4-004": 4}
BY_HAND = {
    "S1-016": (6.304,),
    "S3-038": (2.028, 267.6),  # 128 * 8 * 1.98e9
    "S3-040": (33.45, 19.49),
    "S3-043": (1, 1.117),
    "S3-044": (307.2,),
    "S3-045": (7.45, 14.9, 10),
    "S4-005": (810,),
    "S4-006": (208.9, 215.2),
    "S4-007": (101.2, 202.3, 809.2),  # 126 * r * 100,352
    "S4-008": (640,),
    "S4-009": (70.42, 112),
    "S4-012": (5.495, 6.116, 4.201),  # 60e6 / 192; 1e9 / 766; 6.67e25 / 4.2e21
    "S4-033": ((989.5, 1979),),
    "S4-034": (141,),
    "S4-042": (3.35,),
    "S4-044": (0.9895,),
    "S4-078": ((20, 1.4),),
    "S4-079": (60,),
}  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer=FEWER
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


def test_the_months_are_those_of_the_prices(root: Path) -> None:
    s.put(root, rules.CHAPTER, RESULTS[rules.CHAPTER])
    assert "(n = 3, read in August to November 2026)" in s.verdict("S0-020").condition
    rows = h.write(root / "data" / "prices.csv", "provider,date\na,2026-12-30\nb,2027-01-02\n")
    assert "per hour (read in December 2026 to January 2027)" in s.verdict("S0-025").condition
    rows.write_text("provider,date\na,2027-01-02\n")
    assert "per hour (read in January 2027)" in s.verdict("S0-025").condition
    rows.write_text("provider,date\n")
    assert "per hour (read in a later month)" in s.verdict("S0-025").condition

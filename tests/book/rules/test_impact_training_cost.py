"""Rules over impact-training-cost."""

from pathlib import Path

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, three
from tq.book.claims.rules import impact_training_cost as rules

RENTED, SLOW = (f"saving/predicted/{case}/codec-as-expected" for case in ("400g/bf16", "100g/fp32"))


def chances(rented: float, slow: float) -> dict[str, float]:
    """That 27 % are saved on 400 Gbit/s against bf16, and on 100 against fp32."""
    return {f"{RENTED}/reaches": rented, f"{SLOW}/reaches": slow}


def sums(run: str, priced: float, slow: float) -> dict[str, float]:
    """Probabilities of the claimed sum on 400 Gbit/s against bf16, and on 100 against fp32."""
    return {f"saved/{run}/400g/bf16/reached": priced, f"saved/{run}/100g/fp32/reached": slow}


RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **chances(0.0, 0.01), **three(RENTED, -0.03, -0.01, -0.005), f"{SLOW}/mid": 0.15,
        **sums("70b", 0.002, 0.15), "saved/70b/400g/bf16/mid": -35e3, "saved/70b/100g/fp32/mid": 148e3,
        **sums("175b-gpt-3", 0.0, 0.003), "saved/175b-gpt-3/400g/bf16/mid": -9e3,
        "saved/175b-gpt-3/100g/fp32/mid": -5e3, "cost/70b/mid": 2.7, "cost/175b-gpt-3/mid": 1.5,
        "job/100g/fp32-both/saving-median": 0.28,
        "layout-factor/ib-ndr": 1.9, "layout-factor/eth-100g": 3.1,
        "elastic/full-size/saves-against-fixed/low": -0.02, "elastic/full-size/saves-against-fixed/high": 0.3,
        "elastic/tuned/saves-against-fixed/low": -0.01, "elastic/tuned/saves-against-fixed/high": 0.004,
    },
}  # fmt: skip
TURNS: list[s.Turn] = [
    ("S0-007", {}, N),
    ("S0-007", chances(0.7, 0.0), P),
    ("S0-007", chances(0.1, 0.25), P),  # a slower network and what fp32 would have sent count in part only
    ("S0-007", chances(0.85, 0.0), F),
    # the low end of 20-40 % less a tenth is 18 %
    ("S0-019", {}, N),
    ("S0-019", three(RENTED, 0.05, 0.17, 0.19), P),
    ("S0-019", {f"{SLOW}/mid": 0.19}, P),
    ("S0-019", three(RENTED, 0.05, 0.19, 0.3), F),
    *(
        (name, changed, wanted)
        for name, run in (("S0-008", "70b"), ("S0-018", "70b"), ("S0-044", "175b-gpt-3"))
        for changed, wanted in (
            ({}, N), (sums(run, 0.7, 0.0), P), (sums(run, 0.0, 0.25), P), (sums(run, 0.85, 0.0), F)
        )
    ),
    ("S3-009", {}, P),
    ("S3-009", {"layout-factor/ib-ndr": 2.6}, P),  # 3 less a tenth is 2.7
    ("S3-009", {"layout-factor/ib-ndr": 3.1, "layout-factor/eth-100g": 1.5}, F),
    ("S3-009", {"layout-factor/eth-100g": 2.6}, N),
    ("S3-030", {}, P),
    ("S3-030", {"elastic/full-size/saves-against-fixed/low": 0.19}, F),  # 20 % less a tenth is 18 %
    ("S3-030", {"elastic/full-size/saves-against-fixed/high": 0.17}, N),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

HOUR = 3.99  # dollars, the median of eleven offers
BY_HAND = {
    "S4-014": (
        1e3 / 24 / HOUR, 1e5 / 16 / 24 / HOUR, 1e6 / 100 / 24 / HOUR, 1e8 / 1e4 / 24 / HOUR, 1e8 / 1e4 / 24 / HOUR,
        5e9 / 2.5e5 / 24 / HOUR,
    ),
    # B200 over H100 at RunPod's community, 2.69 and 5.98 dollars an hour
    "S4-156": (2250 / 989.5 * 2.69 / 5.98, 1 / 0.56, 2.95 / 3.85),
    "S4-114": (480 * 12 / 15 / 3, 45),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


def test_a_loss_is_not_told_as_a_saving(root: Path) -> None:
    for chapter, values in RESULTS.items():
        s.put(root, chapter, values)
    reason = s.verdict("S0-008").condition
    assert "costs $35K" in reason and "saves $148K" in reason

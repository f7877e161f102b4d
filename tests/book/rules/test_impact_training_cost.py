"""Rules over impact-training-cost."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, ends, three
from tq.book.claims.rules import impact_training_cost as rules

ON = [(gbit, base) for gbit in (400, 100, 25) for base in ("bf16", "fp32")]


def savings(*mids: float) -> dict[str, float]:
    """Median savings in the order of ON."""
    keys = [f"saving/predicted/{gbit}g/{base}/fast-codec" for gbit, base in ON]
    return {k: v for key, mid in zip(keys, mids, strict=True) for k, v in three(key, mid - 0.1, mid, mid + 0.2).items()}


def dollars(run: str, priced: float, hundred: float) -> dict[str, float]:
    """Saved on the priced network in the median, on 100 Gbit/s at most."""
    at = f"saved/{run}/"
    return {
        **three(f"{at}400g/bf16", priced - 1e5, priced, priced + 1e4), **three(f"{at}100g/fp32", -5e4, 1e4, hundred)
    }  # fmt: skip


RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **savings(-0.01, -0.01, -0.01, 0.05, 0.26, 0.5), **ends("needed-share/claimed", 0.31, 0.64),
        **dollars("70b", -35e3, 1.1e6), **dollars("175b-gpt-3", -9e3, 2e5), **dollars("175b-20", -1e5, 2.1e6),
        "claimed/base": 887685, **ends("claimed/share-of-table", 0.2, 0.2), "cost/70b/mid": 2.7,
        "cost/175b-gpt-3/mid": 1.5,
        "layout-factor/ib-ndr": 1.88, "layout-factor/eth-100g": 3.79, **ends("spot-discount", 0.4, 0.6),
        "spot-discount/offers": 5,
    },
}  # fmt: skip
TURNS: list[s.Turn] = [
    *(
        (name, changed, wanted)
        for name in ("S0-007", "S0-019")
        for changed, wanted in (
            ({}, P), (savings(0.0, 0.0, 0.0, 0.1, 0.1, 0.15), N), (savings(0.4, 0.4, 0.4, 0.4, 0.4, 0.5), F)
        )
    ),
    ("S0-008", {}, P),
    ("S0-008", dollars("70b", 3e5, 1e6), F),
    ("S0-008", dollars("70b", 0.0, 1e5), N),
    ("S0-018", {}, P),
    ("S0-018", {**dollars("70b", 3e5, 1e6), "claimed/share-of-table/high": 0.4}, F),
    ("S0-018", dollars("70b", 0.0, 1e5), N),
    ("S0-043", {}, P),
    ("S0-043", {**savings(*[0.4] * 6), **dollars("70b", 3e5, 1e6)}, F),
    ("S0-043", {**savings(*[0.1] * 6), **dollars("70b", 0.0, 1e5)}, N),
    ("S0-044", {}, P),
    ("S0-044", dollars("175b-gpt-3", 1.3e6, 2e6), F),
    ("S0-044", dollars("175b-20", 0.0, 1e6), N),
    ("S3-009", {}, P),
    ("S3-009", {"layout-factor/ib-ndr": 3.2}, F),
    ("S3-009", {"layout-factor/eth-100g": 1.5}, N),
    ("S3-030", {}, F),
    ("S3-030", {"spot-discount/high": 0.8}, P),
    ("S3-030", ends("spot-discount", 0.7, 0.8), N),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

"""Rules over compressed-allreduce."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import compressed_allreduce as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **{f"bytes/fewer/{m}/{n}": v for m, n, v in (("all-gather", 2, 7.5), ("all-gather", 8, 1.9))},
        **{f"bytes/fewer/ours/{n}": 7.5 for n in (2, 8)},
        "sparse/message": 500.0,
        "sparse/ranks-64": 15.6,
        "faster/ours/100/2/16mib": 7.2,
    },
    rules.ADAMW: {"gap/top-k-1pc": 0.4},
    rules.TRAINING: {"gap/ddp-4": 0.001, "gap/ddp-4/half-width": 0.003},
}
TURNS: list[s.Turn] = [
    ("S0-017", {}, P),
    ("S0-017", {"bytes/fewer/all-gather/8": 7.4}, F),
    ("S0-017", {"bytes/fewer/ours/8": 2.0}, N),
    ("S3-029", {}, P),
    ("S3-029", {"gap/top-k-1pc": 0.001}, F),
    ("S3-029", {"sparse/message": 100.0}, N),
    ("S4-100", {}, F),
    ("S4-100", {"gap/ddp-4": 0.2}, P),
    ("S4-100", {"gap/ddp-4": 0.2, "bytes/fewer/ours/2": 2.0, "faster/ours/100/2/16mib": 1.1}, N),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

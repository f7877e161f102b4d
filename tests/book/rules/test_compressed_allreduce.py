"""Rules over compressed-allreduce."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, every
from tq.book.claims.rules import compressed_allreduce as rules

OURS, BF16, GATHER = "bytes/fewer/ours/{}", "bytes/fewer/bf16/{}", "bytes/fewer/all-gather/{}"
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **every(OURS, (2, 8), 7.5), **every(BF16, (2, 8), 2.0),
        **{GATHER.format(n): fewer for n, fewer in ((2, 7.5), (4, 3.7), (8, 1.9))},
        "faster/ours/100/2/16mib": 7.2,
    },
    rules.TRAINING: {"loss/ddp-4/gap": (0.004, -0.02, 0.03)},
}  # fmt: skip
TURNS: list[s.Turn] = [
    # eight times, to a tenth
    ("S0-001", {}, P),
    ("S0-001", every(BF16, (2, 8), 1.02), F),
    ("S0-001", every(OURS, (2, 8), 7.1), N),
    ("S0-001", every(OURS, (2, 8), 9.0), N),
    ("T-011", {}, P),
    ("T-011", every(GATHER, (2, 4, 8), 7.5), F),
    ("T-011", {GATHER.format(2): 7.1}, N),
    ("S0-017", {}, P),
    ("S0-017", {GATHER.format(8): 6.8, OURS.format(8): 6.7}, F),
    ("S0-017", {OURS.format(8): 6.7}, N),
    ("S4-100", {}, F),  # 3.75 times fewer than bf16
    ("S4-100", {OURS.format(2): 3.9}, P),  # 1.95 times
    ("S4-100", {OURS.format(2): 1.9}, N),
]

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

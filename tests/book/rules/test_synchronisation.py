"""Rules over waiting, simulated events and sparse messages."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import synchronisation as rules

SHARES = {f"waits/{run}/ib-ndr/all": 0.1 for run in rules.RUNS}
RESULTS = {
    rules.CHAPTER: {
        "scaling/linear/last-over-best": 10.0, "scaling/tree/last-over-best": 1.0, "scaling/linear/best": 32.0,
        "scaling/n-star": 40.0, "cost/barrier": 0.16, "cost/message": 0.47, "cost/rollback": 0.21,
        "barrier/normal/with-barrier": 1.01, "barrier/exponential/with-barrier": 0.99,
        "step-over-synchronous/for-good/one-backup-rank": 0.35, "waits/24576/2-percent": 0.075,
        "speedup/for-good/one-backup-rank": 2.5, "speedup/sudden/one-backup-rank": 1.2,
        "speedup/for-good/staleness-4": 0.9, "speedup/sudden/staleness-4": 0.8,
        "dgc/message": 500.0, "fewer/dgc-sgd": 33.0, "gap/dgc-sgd": 0.002,
    },
    rules.TRAFFIC: SHARES,
}  # fmt: skip
LARGE = dict.fromkeys(SHARES, 0.9)
TURNS: list[s.Turn] = [
    ("S3-023", {}, P),
    ("S3-023", {"scaling/tree/last-over-best": 1.2}, F),
    ("S3-023", {"scaling/linear/last-over-best": 1.05}, N),
    ("S3-024", {}, F),
    ("S3-024", {"cost/rollback": 0.0}, P),
    ("S3-024", {"cost/barrier": 0.0, "cost/message": 0.0, "cost/rollback": 0.0}, N),
    ("S3-025", {}, F),
    ("S3-025", {"barrier/normal/with-barrier": 0.9, "barrier/exponential/with-barrier": 1.1}, N),
    ("S3-025", {"barrier/exponential/with-barrier": 1.04}, P),
    ("S3-029", {}, F),
    ("S3-029", {"gap/dgc-sgd": 0.3}, F),  # the claim is about message sizes
    ("S3-029", {"dgc/message": 200.0}, N),
    ("S3-029", {"dgc/message": 700.0}, N),
    # 12.7 % are lost; a step takes 1 + .075 / .925 + c / (1 - c)
    ("S3-077", {}, N),  # 27 %
    ("S3-077", {"waits/405b/ib-ndr/all": 0.36}, N),  # 47 %
    ("S3-077", {"waits/405b/ib-ndr/all": 0.6}, P),  # 66 %
    ("S3-077", LARGE, F),
    ("S4-126", {}, P),
    ("S4-126", {"speedup/for-good/staleness-4": 1.1, "speedup/sudden/staleness-4": 1.1}, F),
    ("S4-126", {"speedup/sudden/one-backup-rank": 0.9}, N),
]

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer={"S3-029": 2}
)

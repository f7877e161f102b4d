"""Rules over data-parallel-training."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import data_parallel_training as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "gap/fsdp-4": 0.001,
        "gap/fsdp-4/half-width": 0.004,
        "share/ddp-fp32/100": 0.8,
        "share/ddp-fp32/1000": 0.3,
        "share/ddp-4/1000": 0.1,
        "faster/fsdp-4/100": 1.5,
        "sooner/ddp-4/100": 4.1,
        "whole/same-losses": True,
    },
}
TURNS: list[s.Turn] = [
    ("S4-046", {}, P),
    ("S4-046", {"share/ddp-fp32/100": 0.02, "share/ddp-fp32/1000": 0.01, "share/ddp-4/1000": 0.0}, F),
    ("S4-046", {"share/ddp-4/1000": 0.7}, N),
    *(
        (name, changed, wanted)
        for name in ("S0-059", "T-020")
        for changed, wanted in (({}, P), ({"gap/fsdp-4": 0.3}, F), ({"faster/fsdp-4/100": 5.0}, N))
    ),
    ("T-019", {}, P),
    ("T-019", {"whole/same-losses": False}, F),
    ("T-019", {"sooner/ddp-4/100": 30.0}, N),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

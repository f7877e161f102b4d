"""Rules over data-parallel-training."""

from pathlib import Path

import pytest

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, L, N, P
from tq.book.claims.rules import data_parallel_training as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "gap/fsdp-4": 0.001,
        "gap/fsdp-4/half-width": 0.004,
        "share/ddp-fp32/100": 0.8,
        "share/ddp-fp32/1000": 0.3,
        "share/fsdp-fp32/1000": 0.6,
        "sent/fsdp-fp32/1000": 6.0,
        "sent/ddp-fp32/1000": 4.0,
        "faster/fsdp-4/100": 1.5,
        "sooner/ddp-4/100": 4.1,
        "whole/same-losses": True,
    },
    rules.ENGINES: {"fewer/megatron": 7.5, "equal/megatron": True},
    rules.TRAFFIC: s.every("waits/{}/ib-ndr/data-parallel", rules.RUNS, 0.05),
}
TURNS: list[s.Turn] = [
    ("S4-046", {}, P),
    ("S4-046", {"share/ddp-fp32/1000": 0.11}, P),
    ("S4-046", {"share/ddp-fp32/1000": 0.09}, F),
    ("S4-046", {"waits/405b/ib-ndr/data-parallel": 0.11}, N),
    ("S1-039", {}, F),
    ("S1-039", {"share/ddp-fp32/1000": 0.7}, P),
    ("S1-039", {"share/fsdp-fp32/1000": 0.4, "sent/ddp-fp32/1000": 5.0}, N),
    ("S0-059", {}, L),
    ("T-020", {}, L),
    ("T-019", {}, L),
]
#: A limit stays one.
FEWER = {"S0-059": 1, "T-020": 1, "T-019": 1}

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, fewer=FEWER
)
BY_HAND = {"S4-124": (0, 13 / 315)}
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


@pytest.mark.parametrize(
    ("names", "changed", "first"),
    [
        (("S0-059", "T-020"), {}, "Lifted here"),
        (("S0-059", "T-020"), {"gap/fsdp-4": 0.3}, "Stands"),
        (("S0-059", "T-020"), {"gap/fsdp-4/half-width": 0.01}, "Stands"),  # its interval counts
        (("S0-059", "T-020"), {"faster/fsdp-4/100": 0.9}, "Stands"),
        (("S0-059", "T-020"), {"fewer/megatron": 6.9}, "Stands"),
        (("S0-059", "T-020"), {"equal/megatron": False}, "Stands"),
        (("T-019",), {}, "Lifted here"),
        (("T-019",), {"whole/same-losses": False}, "Stands"),
        (("T-019",), {"sooner/ddp-4/100": 0.9}, "Stands"),
    ],
)
def test_what_was_measured_lifts_a_limit(root: Path, names: tuple[str, ...], changed: s.Values, first: str) -> None:
    for chapter, values in RESULTS.items():
        s.put(root, chapter, {key: changed.get(key, value) for key, value in values.items()})
    for name in names:
        found = s.verdict(name)
        assert found.condition.startswith(first)
        assert all(check.holds for check in found.checks) == (first == "Lifted here")

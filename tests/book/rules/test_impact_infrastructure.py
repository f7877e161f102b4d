"""Rules over impact-infrastructure."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import impact_infrastructure as rules

RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "need/datacenters/bf16/50": 84.0,
        "need/datacenters/4-bits/50": 22.0,
        "need/datacenters/diloco-bf16/50": 0.84,
        "need/datacenters/diloco-4/50": 0.22,
        "intellect/use/lowest": 0.84,
        "use/hybrid/fp32/10000": 0.06,
        "use/hybrid/4-bits/10000": 0.3,
        "use/hybrid/diloco-bf16/10000": 0.9,
        "use/pool/fp32/100000": 0.33,
        "use/pool/4-bits/100000": 0.63,
    },
}
FEASIBLE = {"need/datacenters/4-bits/50": 8.0}
UNPUBLISHED, NO_METHOD = {"intellect/use/lowest": 0.2}, {"need/datacenters/diloco-bf16/50": 12.0}
TURNS: list[s.Turn] = [
    ("S0-041", {}, N),
    ("S0-041", FEASIBLE, P),
    ("S0-041", {**FEASIBLE, **UNPUBLISHED, **NO_METHOD}, F),
    ("S0-041", {**FEASIBLE, **UNPUBLISHED}, P),  # agreeing rarely was feasible before
    ("S0-041", {**UNPUBLISHED, **NO_METHOD}, P),  # impossible before, and codes do not change it
    ("S0-042", {}, P),
    ("S0-042", {"use/hybrid/4-bits/10000": 0.6}, F),
    ("S0-042", {"use/hybrid/4-bits/10000": 0.6, "use/hybrid/fp32/10000": 0.55}, P),  # was practical before
    ("S0-042", {"use/pool/4-bits/100000": 0.4}, N),
    ("S0-042", {"use/pool/fp32/100000": 0.55}, N),  # was practical before
]

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)

"""Rules over impact-infrastructure, and what shaped links said where it is recorded."""

from pathlib import Path

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
        "use/hybrid/bf16/10000": 0.1,
        "use/hybrid/4-bits/10000": 0.3,
        "use/hybrid/diloco-bf16/10000": 0.9,
        "use/hybrid/diloco-4/10000": 0.95,
        "use/pool/fp32/100000": 0.33,
        "use/pool/4-bits/100000": 0.63,
        "use/edge/bf16/100": 0.01,
        "use/edge/4-bits/100": 0.03,
        "use/edge/diloco-bf16/100": 0.48,
        "use/edge/diloco-4/100": 0.78,
    },
}
SHAPED = {"sites/sooner/diloco-32-4": 120.0, "sites/sooner/ddp-4": 6.0, "gap/diloco": 0.02}
ALL_FLIP = {"use/hybrid/4-bits/10000": 0.6, "use/edge/4-bits/100": 0.6}
NONE_FLIP = {"use/pool/4-bits/100000": 0.4, "use/edge/diloco-4/100": 0.4}
IMPOSSIBLE = {"need/datacenters/diloco-bf16/50": 50.0, "intellect/use/lowest": 0.2}
TURNS: list[s.Turn] = [
    ("S0-041", {}, N),
    ("S0-041", {"need/datacenters/4-bits/50": 8.0}, P),
    ("S0-041", {"need/datacenters/4-bits/50": 8.0, **IMPOSSIBLE}, F),
    ("S0-041", IMPOSSIBLE, N),  # and four bits do not change it
    ("S0-041", {"need/datacenters/4-bits/50": 2.0, "need/datacenters/bf16/50": 8.0}, N),
    ("S0-042", {}, P),
    ("S0-042", ALL_FLIP, F),
    ("S0-042", NONE_FLIP, N),
    ("S0-042", {"use/pool/4-bits/100000": 0.4}, P),  # the edge with DiLoCo is left
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)


def test_shaped_links_are_named_where_they_are_recorded_and_change_no_verdict(root: Path) -> None:
    s.put(root, rules.CHAPTER, RESULTS[rules.CHAPTER])
    assert "it is not measured" in s.verdict("S0-041").condition
    s.put(root, rules.SHAPED, SHAPED)
    found = s.verdict("S0-041")
    assert found.verdict == N and "120 times with DiLoCo" in found.condition
    assert rules.SHAPED in {each.chapter for each in found.evidence}


def test_what_was_read_in_vain_is_no_evidence(root: Path) -> None:
    s.put(root, rules.CHAPTER, RESULTS[rules.CHAPTER])
    s.put(root, rules.SHAPED, {key: SHAPED[key] for key in ("sites/sooner/diloco-32-4", "sites/sooner/ddp-4")})
    found = s.verdict("S0-041")
    assert "it is not measured" in found.condition
    assert rules.SHAPED not in {each.chapter for each in found.evidence}

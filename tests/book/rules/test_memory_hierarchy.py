"""Rules over the edge of fast memory, over transfers that hide, and over what attention keeps."""

from pathlib import Path

import pytest

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import memory_hierarchy as rules

PAST, WITHIN = "cliff/{}/cyclic/lru/1.1", "cliff/{}/cyclic/lru/0.9"
RESULTS = {
    rules.CHAPTER: {
        PAST.format("4kib"): 300.0, PAST.format("64kib"): 40.0, PAST.format("4mib"): 6.0,
        **s.every(WITHIN, rules.BLOCKS, 1.05), "cliff/4mib/cyclic/belady/1.1": 1.4,
        "cliff/4mib/sawtooth/lru/1.1": 1.5, "ahead/plain": 1.4, "ahead/over-memory": 1.05,
        "order/sweep/lfu": 2.0, "order/sweep/belady": 1.5, "order/fused/lfu": 1.0, "order/fused/belady": 1.0,
        "stream/128/24/fp32/over-memory": 1.6, "stream/512/24/fp32/over-memory": 1.1,
        "context/layer/1024": 1.5, "context/layer/2048": 2.0, "context/layer/4096": 3.0, "context/layer/8192": 5.0,
        "context/layer/16384": 9.0,
    }
}  # fmt: skip
test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS,
    [
        ("S1-036", {}, P), ("S1-036", {"stream/128/24/fp32/over-memory": 1.1}, F),
        ("S1-036", {"stream/512/24/fp32/over-memory": 1.3}, N),
        ("S1-038", {}, P), ("S1-038", {"order/sweep/lfu": 1.55}, F), ("S1-038", {"order/fused/lfu": 1.2}, N),
        ("S3-075", {}, F), ("S3-075", {"ahead/plain": 1.2}, P),
        ("S3-075", {"ahead/plain": 1.2, "cliff/4mib/sawtooth/lru/1.1": 5.5, "cliff/4mib/cyclic/belady/1.1": 5.5}, N),
        ("S3-048", {}, P), ("S3-048", {"context/layer/4096": 5.0}, F), ("S3-048", {"context/layer/8192": 4.0}, N),
    ],
    apart=("S3-036",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, F), ({WITHIN.format("4kib"): 1.4}, P), ({PAST.format("4kib"): 60.0}, P),
        ({PAST.format("4kib"): 9.0, PAST.format("64kib"): 8.0}, N),
    ],
)  # fmt: skip
def test_the_cliff_is_what_was_measured(root: Path, changed: dict[str, float], wanted: str) -> None:
    s.put(root, rules.CHAPTER, RESULTS[rules.CHAPTER] | changed)
    found = s.verdict("S3-036")
    assert found.verdict == wanted and "measured" in found.condition
    assert {each.chapter for each in found.evidence if each.keys} == {rules.CHAPTER}


def test_until_it_is_measured_the_model_decides(root: Path) -> None:
    found = s.verdict("S3-036")
    assert found.verdict == F and "100 times slower" in found.condition and "10 times slower" in found.condition
    assert found.evidence and not any(each.keys for each in found.evidence)

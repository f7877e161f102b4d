"""Rules over the edge of fast memory, over transfers that hide, and over what attention keeps."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import memory_hierarchy as rules

PAST, WITHIN = "cliff/{}/cyclic/lru/1.1", "cliff/{}/cyclic/lru/0.9"
RESULTS = {
    rules.CHAPTER: {
        PAST.format("4kib"): 300.0, PAST.format("64kib"): 40.0, PAST.format("4mib"): 6.0,
        **s.every(WITHIN, rules.BLOCKS, 1.05), "cliff/4mib/cyclic/belady/1.1": 1.4,
        "cliff/4mib/sawtooth/lru/1.1": 1.5, "ahead/plain": 1.4, "ahead/over-memory": 1.05,
        "order/sweep/lfu": 2.0, "order/sweep/gemini": 1.54, "order/fused/lfu": 1.0, "order/fused/gemini": 1.0,
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
        ("S1-038", {}, N), ("S1-038", {"order/sweep/lfu": 1.6}, F),
        ("S3-075", {}, F), ("S3-075", {"ahead/plain": 1.2}, P),
        ("S3-075", {"ahead/plain": 1.2, "cliff/4mib/sawtooth/lru/1.1": 5.5, "cliff/4mib/cyclic/belady/1.1": 5.5}, N),
        ("S3-048", {}, P), ("S3-048", {"context/layer/4096": 5.0}, F), ("S3-048", {"context/layer/8192": 4.0}, N),
        ("S3-036", {}, F), ("S3-036", {WITHIN.format("4kib"): 1.4}, P), ("S3-036", {PAST.format("4kib"): 60.0}, P),
        ("S3-036", {PAST.format("4kib"): 9.0, PAST.format("64kib"): 8.0}, N),
    ],
    fewer={"S1-038": 2},
)  # fmt: skip

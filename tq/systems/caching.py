"""What a small fast memory misses of a loop that is larger than it: the same items read in a circle, over and over.

LRU evicts what comes next and misses every time; the best eviction keeps all but one place and misses what does not
fit. Not modelled: prefetching, other patterns.

Source: Belady 1966, A study of replacement algorithms for a virtual-storage computer; Mattson et al. 1970.
"""

from __future__ import annotations

from tq.systems.arguments import one_of, positive

POLICIES = ("lru", "best")


def loop_miss_share(loop: float, fast: float, policy: str) -> float:
    """Share of the reads of a loop that a fast memory misses, both in one unit and of many items; 0 where it fits."""
    positive("loop", loop, finite=True)
    positive("fast", fast, finite=True)
    one_of("policy", policy, POLICIES)
    if loop <= fast:
        return 0.0
    return 1.0 if policy == "lru" else (loop - fast) / loop


def slowdown(miss_share: float, miss_cost: float) -> float:
    """Mean time of a read where a miss takes miss_cost times as long as a hit."""
    positive("miss_share", miss_share, zero=True, most=1.0)
    positive("miss_cost", miss_cost, finite=True)
    return 1 + (miss_cost - 1) * miss_share

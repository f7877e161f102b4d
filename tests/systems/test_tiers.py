"""Policies against brute force and published numbers; a pipeline against a simulation by hand; wear; hit rates."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems import caching, tiers
from tq.systems.tiers import Streamed, cyclic, pipeline_s, replay, sawtooth, steady_misses, with_sweep

traces = st.lists(st.integers(0, 5), min_size=1, max_size=10)


@settings(max_examples=300, deadline=None)
@given(trace=traces, capacity=st.integers(1, 5))
def test_belady_is_the_best_of_all(trace: list[int], capacity: int) -> None:
    best = tiers.least_misses(trace, capacity)
    assert replay(trace, capacity, "belady").missed.sum() == best
    for policy in tiers.POLICIES:
        assert replay(trace, capacity, policy, len(trace)).missed.sum() >= best


@settings(max_examples=200, deadline=None)
@given(trace=traces, capacity=st.integers(1, 5), policy=st.sampled_from(tiers.POLICIES), step=st.integers(1, 5))
def test_a_pool_that_does_as_told_holds_what_is_asked(
    trace: list[int], capacity: int, policy: str, step: int
) -> None:
    found, pool = replay(trace, capacity, policy, step), {}
    for block, missed, slot in zip(trace, found.missed, found.place, strict=True):
        assert 0 <= slot < capacity and missed == (pool.get(int(slot)) != block)
        pool[int(slot)] = block
        assert len(set(pool.values())) == len(pool)


def _plainly(trace: list[int], capacity: int, policy: str) -> int:
    """LRU, MRU and LFU as one would write them on paper."""
    held: list[int] = []
    last: dict[int, int] = {}
    uses: dict[int, int] = {}
    missed = 0
    for at, block in enumerate(trace):
        if block not in held:
            missed += 1
            if len(held) == capacity:
                key = {"lru": lambda b: last[b], "mru": lambda b: -last[b], "lfu": lambda b: (uses[b], last[b])}
                held.remove(min(held, key=key[policy]))
            held.append(block)
        last[block], uses[block] = at, uses.get(block, 0) + 1
    return missed


@settings(max_examples=300, deadline=None)
@given(
    trace=st.lists(st.integers(0, 7), max_size=40), capacity=st.integers(1, 6),
    policy=st.sampled_from(["lru", "mru", "lfu"]),
)  # fmt: skip
def test_simple_policies_are_what_their_names_say(trace: list[int], capacity: int, policy: str) -> None:
    assert replay(trace, capacity, policy).missed.sum() == _plainly(trace, capacity, policy)


def test_golden_numbers() -> None:
    for n, c in ((24, 12), (110, 100), (7, 3)):
        def share(trace: Any, policy: str, n: int = n, c: int = c) -> float:
            return steady_misses(trace(n), c, policy, 4, n - 1) / len(trace(n))

        assert share(cyclic, "lru") == 1.0
        assert share(cyclic, "belady") == pytest.approx((n - c) / (n - 1), abs=1e-9)
        assert share(sawtooth, "lru") == share(sawtooth, "belady") == pytest.approx((n - c) / n)
    assert steady_misses(cyclic(24), 12, "belady", 4, 23) / 24 == pytest.approx(0.5217, abs=5e-5)


@pytest.mark.parametrize(
    ("policy", "fused", "swept"),
    [("lru", 1.0, 2.0), ("lfu", 1.0, 2.0), ("gemini", 1.0, 1.5417), ("belady", 1.0, 1.5)],
)
def test_fusing_the_update_is_worth_more_than_any_policy(policy: str, fused: float, swept: float) -> None:
    assert steady_misses(sawtooth(24), 12, policy) / 24 == pytest.approx(fused)
    assert steady_misses(with_sweep(24), 12, policy) / 24 == pytest.approx(swept, abs=1e-4)


def test_the_cliff_of_the_document() -> None:
    lru = steady_misses(cyclic(110), 100, "lru") / 110
    best = steady_misses(cyclic(110), 100, "belady", 4, 109) / 110
    back = steady_misses(sawtooth(110), 100, "lru") / 220
    found = [1 + 99 * share for share in (lru, best, back)]
    assert found == pytest.approx([100, 10.08, 10.0], abs=0.01)
    assert found[0] == caching.slowdown(caching.loop_miss_share(1.1, 1.0, "lru"), 100)


def test_what_fits_does_not_miss() -> None:
    for policy in tiers.POLICIES:
        assert steady_misses(cyclic(8), 8, policy) == 0


def test_next_uses_end_with_the_step() -> None:
    assert tiers.next_uses([1, 2, 1, 2]).tolist() == [2, 3, tiers.NEVER, tiers.NEVER]
    assert tiers.next_uses([1, 2, 1, 2], 2).tolist() == [tiers.NEVER] * 4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (([1.5], 2, "lru"), "trace must be"), (([-1], 2, "lru"), "trace must be"), (([1], 0, "lru"), "capacity"),
        (([1], 2, "fifo"), "policy must be one of"), (([1], 2, "gemini"), "needs step"),
    ],
)  # fmt: skip
def test_wrong_traces(given: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        replay(*given)


# --- time ---
times = st.lists(st.floats(0, 9), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), n=st.integers(1, 12), buffers=st.integers(1, 5))
def test_a_pipeline_takes_what_its_longest_chain_takes(data: Any, n: int, buffers: int) -> None:
    one = st.lists(st.floats(0.001, 9), min_size=n, max_size=n)
    read, work, back = (np.array(data.draw(one)) for _ in range(3))
    took = pipeline_s(read, work, back, buffers)
    assert took <= read.sum() + work.sum() + back.sum() + 1e-9
    assert took >= max(read.sum() + work[-1] + back[-1], read[0] + work.sum() + back[-1], back.sum() + read[0]) - 1e-9
    assert took <= pipeline_s(read, work, back, max(1, buffers - 1)) + 1e-9
    if buffers == 1:
        assert took == pytest.approx(read.sum() + work.sum() + back.sum())


def test_a_pipeline_by_hand() -> None:
    assert pipeline_s([1, 1, 1], [2, 2, 2], [0, 0, 0], 2) == 7
    assert pipeline_s([3, 3, 3], [1, 1, 1], [1, 1, 1], 3) == 11
    assert pipeline_s([1, 1, 1], [1, 1, 1], [5, 5, 5], 3) == 17
    with pytest.raises(ValueError, match="one length"):
        pipeline_s([1], [1, 2], [1], 2)


STEP = Streamed(24, 1e6, 0.01, 0.03, 0.01, 1e9, 1e9, 0.6e9)


def test_a_step_is_near_its_bound() -> None:
    import dataclasses

    assert STEP.bytes_read() + STEP.bytes_written() == 28 * 24e6
    assert STEP.compute_s() <= STEP.seconds() <= 1.1 * STEP.compute_s() and STEP.binds == "compute"
    slow = dataclasses.replace(STEP, read_bytes_per_s=1e8, write_bytes_per_s=1e8, both_bytes_per_s=6e7)
    assert slow.disk_s() <= slow.seconds() <= 1.15 * slow.disk_s() and slow.binds == "disk"
    factor = slow.hides_at()
    assert factor > 1 and slow._times(factor) == pytest.approx(1.02 * factor * slow.compute_s(), rel=1e-3)
    small = dataclasses.replace(slow, moment_bytes=1.55)
    assert small.bytes_read() + small.bytes_written() == pytest.approx(15.1 * 24e6)
    assert small.seconds() < slow.seconds() / 1.5
    held = dataclasses.replace(slow, resident=24, kept=False)
    assert held.bytes_read() == held.bytes_written() == 0 and held.seconds() == pytest.approx(held.compute_s())
    exact = dataclasses.replace(STEP, deferred=True, update_s=0.002)
    assert exact.bytes_read() + exact.bytes_written() == 40 * 24e6 and exact.seconds() > STEP.seconds()


def test_wear_of_the_design() -> None:
    written = np.array([12, 9.55, 5.55, 3.55]) * 100e9
    assert np.round(tiers.steps_of_a_drive(1200e12, written)).tolist() == [1000, 1257, 2162, 3380]
    assert tiers.steps_of_a_drive(1200e12, 12e11, 2.0) == 500
    with pytest.raises(ValueError, match="amplification"):
        tiers.steps_of_a_drive(1, 1, 0.5)


def test_misses_cost_time() -> None:
    assert tiers.accesses_s(0.25, 1.0, 5.0) == 2.0
    assert tiers.ahead_s(0.5, 1.0, 5.0) == 2.5 and tiers.ahead_s(0.5, 3.0, 5.0) == 3.0


# --- caches of answers ---
def test_hit_rates_against_drawn_requests() -> None:
    items, held, rng = 500, 60, np.random.default_rng(0)
    shares = np.arange(1, items + 1) ** -1.1
    drawn = rng.choice(items, 200_000, p=shares / shares.sum())
    assert tiers.zipf_hit_rate(items, held, 1.1) == pytest.approx((drawn < held).mean(), abs=0.005)
    assert tiers.zipf_hit_rate(items, items, 0.0) == pytest.approx(1.0)
    assert tiers.zipf_hit_rate(items, held, 1.1, 10) < tiers.zipf_hit_rate(items, held, 1.1, 1e6)


def test_tiers_are_asked_in_turn() -> None:
    assert tiers.tiered_cost([0.5, 0.5], [0.1, 0.2], 10) == pytest.approx(0.1 + 0.5 * 0.2 + 0.25 * 10)
    with pytest.raises(ValueError, match="one length"):
        tiers.tiered_cost([0.5], [], 1)

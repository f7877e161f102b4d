"""Policies: who waits for whom, by brute force and by closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems.stragglers import POLICIES, Coordinator, Delays, Policy, forecast
from tq.systems.synchronisation import expected_order

TIMES = Delays(1.0, spread=0.2).draw(400, 4, seed=1)


def test_synchronous_steps_take_the_slowest() -> None:
    found = forecast(Policy("all"), TIMES, 400, exchange_s=0.5)
    assert found.step_s == pytest.approx(TIMES.max(1).mean() + 0.5)
    assert found.busy == pytest.approx(TIMES.mean() / found.step_s) and found.unused == 0


@pytest.mark.parametrize("alone", [2, 8, 32])
def test_local_steps_take_the_slowest_sum(alone: int) -> None:
    steps = 400 // alone * alone
    found = forecast(Policy("alone", local_steps=alone), TIMES, steps)
    assert found.step_s == pytest.approx(TIMES[:steps].reshape(-1, alone, 4).sum(1).max(1).sum() / steps)


def staircase(work: np.ndarray, staleness: int) -> np.ndarray:
    """Bounded staleness by its recursion: a step begins after the own last one and all others' s + 1 steps back."""
    units, ranks = work.shape
    ends = np.zeros((units, ranks))
    for t in range(units):
        begins = ends[t - 1] if t else np.zeros(ranks)
        if t > staleness:
            begins = np.maximum(begins, ends[t - 1 - staleness].max())
        ends[t] = begins + work[t]
    return ends


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6), st.integers(0, 99))
def test_staleness_equals_its_recursion(staleness: int, seed: int) -> None:
    work = Delays(1.0, 0.3, slow_rank=0, sudden=0.1).draw(40, 3, seed)
    ends = np.sort(staircase(work, staleness).ravel())
    found = forecast(Policy("stale", staleness=staleness), work, 20)
    assert found.updates_s == pytest.approx(ends[:60])


def test_without_slack_staleness_waits_as_all_do() -> None:
    stale, all_ = (forecast(p, TIMES, 300).step_s for p in (Policy("s", staleness=0), Policy("all")))
    assert stale == pytest.approx(all_, rel=1e-2)


def test_backup_ranks_take_an_order_statistic() -> None:
    """Where ranks are alike and nobody is late by more than a step, the k-th order statistic is what a step takes; a
    late rank begins the next step later, so it is a little more."""
    times = Delays(1.0, spread=0.05).draw(4000, 8, seed=2)
    found = forecast(Policy("one less", dropped=1), times, 4000)
    assert 1 + 0.05 * expected_order(8, 7) <= found.step_s <= 1 + 0.05 * expected_order(8, 8)
    assert found.unused > 0.05


def test_a_rank_that_is_slow_for_good() -> None:
    times = Delays(1.0, 0.0, slow_rank=3).draw(64, 4)
    steps = {p.name: forecast(p, times, 320).step_s for p in POLICIES}
    assert steps["synchronous"] == steps["8 local steps"] == steps["32 local steps"] == pytest.approx(3.0)
    assert steps["one backup rank"] == pytest.approx(1.0)
    assert 2.9 < steps["staleness 4"] < 3.0  # a few steps of slack, and then its pace


def test_sudden_delays_average_out_over_local_steps() -> None:
    times = Delays(1.0, 0.0, sudden=0.1).draw(3200, 4)
    steps = {p.name: forecast(p, times, 3200).step_s for p in POLICIES}
    assert steps["synchronous"] == pytest.approx(1 + 2 * (1 - 0.9**4), rel=0.05)
    assert steps["32 local steps"] < steps["8 local steps"] < steps["synchronous"]
    assert steps["32 local steps"] > 1.2  # the mean of a rank


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(0, 999), st.sampled_from(POLICIES))
def test_coordinator_never_strands_a_rank(ranks: int, seed: int, policy: Policy) -> None:
    """Whatever the order of arrivals, somebody always works, and no result counts twice."""
    draw, coordinator = np.random.default_rng(seed), Coordinator(policy, ranks)
    working, applied, sent = dict.fromkeys(range(ranks), 0), 0, 0
    for _ in range(200):
        rank = int(draw.choice(sorted(working)))
        decision = coordinator.arrived(rank, working.pop(rank))
        sent, applied = sent + 1, applied + len(decision.applies)
        assert len(set(decision.applies)) == len(decision.applies)
        working.update(dict.fromkeys(decision.releases, coordinator.version))
        assert working
        if policy.staleness is not None:
            assert max(coordinator.clocks) - min(coordinator.clocks) <= policy.staleness + 1
    assert applied + coordinator.unused + len(coordinator.gathered) == sent


def test_hostile_arguments() -> None:
    with pytest.raises(ValueError, match="exclude"):
        Policy("both", dropped=1, staleness=1)
    with pytest.raises(ValueError, match="dropped"):
        Coordinator(Policy("none left", dropped=2), 2)
    coordinator = Coordinator(Policy("all"), 2)
    coordinator.arrived(0, 0)
    with pytest.raises(ValueError, match="waits"):
        coordinator.arrived(0, 0)
    with pytest.raises(ValueError, match="version 7"):
        coordinator.arrived(1, 7)
    with pytest.raises(ValueError, match="work_s"):
        forecast(Policy("all"), np.array([[1.0, np.nan]]), 3)
    with pytest.raises(ValueError, match="slow_rank"):
        Delays(1.0, slow_rank=4).draw(3, 4)
    with pytest.raises(ValueError, match="slowdown"):
        Delays(1.0, slowdown=0.5)

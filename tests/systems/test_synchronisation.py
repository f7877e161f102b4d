"""Order statistics, scaling and sparse volumes: golden numbers, brute force, hostile input."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems import synchronisation as sync

GOLDEN = {8: 1.4236, 64: 2.3437, 1024: 3.2482, 10_000: 3.8516, 24_576: 4.0673}  # E[max] of normal numbers


@pytest.mark.parametrize("ranks", GOLDEN)
def test_golden_maxima_of_normal_numbers(ranks: int) -> None:
    assert sync.expected_max(ranks) == pytest.approx(GOLDEN[ranks], abs=5e-5)
    assert sync.expected_max(ranks) < math.sqrt(2 * math.log(ranks))


def test_one_two_and_three_normal_numbers_have_closed_forms() -> None:
    assert sync.expected_max(1) == pytest.approx(0, abs=1e-10)
    assert sync.expected_max(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-10)
    assert sync.expected_max(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 8, 1024])
def test_maxima_of_exponential_numbers_are_harmonic(ranks: int) -> None:
    assert sync.expected_max(ranks, "exponential") + 1 == pytest.approx(sum(1 / k for k in range(1, ranks + 1)))


@pytest.mark.parametrize("kind", sync.KINDS)
@pytest.mark.parametrize(("ranks", "place"), [(4, 3), (8, 7), (8, 1), (8, 8)])
def test_orders_against_draws(kind: str, ranks: int, place: int) -> None:
    draw = np.random.default_rng(1)
    shape = (200_000, ranks)
    numbers = draw.normal(size=shape) if kind == "normal" else draw.exponential(size=shape) - 1
    drawn = np.sort(numbers, 1)[:, place - 1]
    assert sync.expected_order(ranks, place, kind) == pytest.approx(drawn.mean(), abs=5 * drawn.std() / 200_000**0.5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.sampled_from(sync.KINDS))
def test_orders_sum_to_zero_and_rise(ranks: int, kind: str) -> None:
    orders = [sync.expected_order(ranks, place, kind) for place in range(1, ranks + 1)]
    assert sum(orders) == pytest.approx(0, abs=1e-7 * ranks)
    assert all(a < b for a, b in zip(orders, orders[1:], strict=False))


@pytest.mark.parametrize("kind", sync.KINDS)
def test_intervals_of_extrapolations_cover(kind: str) -> None:
    draw, hits, runs = np.random.default_rng(2), 0, 40
    true = 10 + sync.expected_max(24_576, kind)
    for seed in range(runs):
        samples = draw.normal(10, 1, 400) if kind == "normal" else 9 + draw.exponential(1, 400)
        found = sync.extrapolated_max(samples, 24_576, kind, seed)
        assert found.low < found.mean < found.high
        hits += found.low < true < found.high
    assert hits >= 0.85 * runs


def test_a_wrong_tail_is_far_off() -> None:
    samples = np.random.default_rng(3).exponential(1, 2000)
    wrong, right = (sync.extrapolated_max(samples, 24_576, kind) for kind in sync.KINDS)
    assert wrong.high < 6 < 9 < right.low


def test_waiting_share_of_a_large_cluster() -> None:
    assert sync.waiting_share(10_000, 0.02) == pytest.approx(0.0770 / 1.0770, abs=1e-3)
    assert sync.waiting_share(1, 0.5) == pytest.approx(0, abs=1e-10) and sync.waiting_share(99, 0.0) == 0


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 1e4), st.floats(1e-4, 1), st.floats(0, 10))
def test_best_is_a_minimum(work: float, per_rank: float, per_doubling: float) -> None:
    law = sync.Scaling(work, per_rank, per_doubling)
    if law.best >= 1:
        least = law.seconds(law.best)
        assert least <= law.seconds(law.best * 1.3) and least <= law.seconds(max(1.0, law.best / 1.3))


def test_best_without_one_of_the_costs() -> None:
    assert sync.Scaling(90, 0.1).best == pytest.approx(30)
    assert sync.Scaling(90, 0.0).best == math.inf
    assert sync.Scaling(math.log(2), 0.0, 0.1 * math.log(2) ** 2).best == pytest.approx(10 / math.log(2) * math.log(2))


def test_fit_finds_the_minimum_in_noise() -> None:
    law, draw = sync.Scaling(50, 0.02, 0.1), np.random.default_rng(4)
    ranks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    found = sync.fit_scaling(ranks, [law.seconds(n) * draw.normal(1, 0.02) for n in ranks])
    assert found.best == pytest.approx(law.best, rel=0.2)


def test_sparse_volume() -> None:
    assert sync.sparse_bytes(1e9, 3, 0.001) == pytest.approx(2 * 6e6)
    for ranks in (2, 64, 1000):
        ring = 2 * (ranks - 1) / ranks * 4 * 1e9
        assert ring / sync.sparse_bytes(1e9, ranks, 0.001) == pytest.approx(sync.sparse_factor(ranks, 0.001))


@pytest.mark.parametrize("kept_bits", [48.0, 64.0])
def test_at_the_crossing_both_send_the_same(kept_bits: float) -> None:
    n = sync.sparse_crossing(0.001, 4.25, kept_bits)
    quantized = 2 * (n - 1) / n * 4.25 / 8
    assert (n - 1) * 0.001 * kept_bits / 8 == pytest.approx(quantized)


HOSTILE = [
    (lambda: sync.expected_order(8, 9), "place"), (lambda: sync.expected_max(8, "cauchy"), "kind"),
    (lambda: sync.expected_max(0), "ranks"), (lambda: sync.extrapolated_max([1.0] * 7, 8), "samples_s"),
    (lambda: sync.extrapolated_max([1.0] * 8 + [math.nan], 8), "samples_s"), (lambda: sync.Scaling(0, 1), "work_s"),
    (lambda: sync.Scaling(1, 1).seconds(0.5), "ranks"), (lambda: sync.fit_scaling([1, 2], [1, 2]), "three pairs"),
    (lambda: sync.fit_scaling([1, 2, 4], [1, 0, 2]), "positive"), (lambda: sync.sparse_bytes(1, 2, 2.0), "share"),
    (lambda: sync.sparse_factor(1, 0.1), "ranks"), (lambda: sync.waiting_share(2, math.inf), "spread"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "names"), HOSTILE)
def test_refused(call: object, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        call()  # type: ignore[operator]

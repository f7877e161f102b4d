"""Queues: the printed formulas, a simulation that agrees, and the loads at which 100 times as long is true."""

from __future__ import annotations

import numpy as np
import pytest

from tq.systems import queueing as q


def test_waits_of_the_textbook() -> None:
    # in services; at 2 ms a packet 1, 4 and 9 ms for packets of one size, twice that for exponential ones
    assert q.wait(np.array([0.5, 0.8, 0.9])) == pytest.approx([0.5, 2.0, 4.5])
    assert q.wait(np.array([0.5, 0.8, 0.9]), q.EXPONENTIAL) == pytest.approx([1.0, 4.0, 9.0])
    assert q.wait(0.0) == 0.0


def test_a_hundred_times_as_long() -> None:
    assert q.load_for(100, q.EXPONENTIAL) == pytest.approx(0.99, abs=1e-12)
    assert q.load_for(100) == pytest.approx(0.995, abs=1e-4)
    for factor in (1.0, 2.0, 37.5):
        for variation in (0.0, 1.0, 4.0):
            assert 1 + q.wait(q.load_for(factor, variation), variation) == pytest.approx(factor)


@pytest.mark.parametrize(("variation", "rho"), [(0.0, 0.5), (0.0, 0.8), (1.0, 0.5), (1.0, 0.8)])
def test_lindley_agrees_with_the_formula(variation: float, rho: float) -> None:
    rng = np.random.default_rng(2)
    at = np.cumsum(rng.exponential(1 / rho, 400_000))
    services = np.ones(at.size) if variation == 0 else rng.exponential(1.0, at.size)
    assert q.lindley(at, services).mean() == pytest.approx(q.wait(rho, variation), rel=0.05)


def test_lindley_by_hand_and_step_by_step() -> None:
    assert q.lindley([0.0, 1.0, 1.5, 10.0], 2.0).tolist() == [0.0, 1.0, 2.5, 0.0]
    rng = np.random.default_rng(0)
    at, service, waits = np.cumsum(rng.exponential(1.0, 500)), rng.exponential(0.9, 500), [0.0]
    for i in range(1, 500):
        waits.append(max(0.0, waits[-1] + service[i - 1] - (at[i] - at[i - 1])))
    assert q.lindley(at, service) == pytest.approx(np.array(waits))
    assert q.lindley([], 1.0).size == 0


def test_bad_arguments() -> None:
    for call, said in (
        (lambda: q.wait(1.0), "rho must be below 1"), (lambda: q.wait(-0.1), "rho must be 0 or more"),
        (lambda: q.load_for(0.5), "factor must be at least 1"), (lambda: q.lindley([1.0, 0.5], 1.0), "in order"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            call()

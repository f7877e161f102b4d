"""Queues: textbook numbers, the recursion by hand, simulation against formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems import queueing

#: Load, wait behind constant and behind exponential services of 2 ms, in ms.
TEXTBOOK = [(0.5, 1.0, 2.0), (0.8, 4.0, 8.0), (0.9, 9.0, 18.0)]


@pytest.mark.parametrize(("load", "constant", "exponential"), TEXTBOOK)
def test_golden_waits(load: float, constant: float, exponential: float) -> None:
    assert 2 * queueing.mean_wait(load, 0.0) == pytest.approx(constant)
    assert 2 * queueing.mean_wait(load, 1.0) == pytest.approx(exponential)


def test_where_a_queue_takes_a_hundred_times_as_long() -> None:
    assert queueing.load_of(100) == pytest.approx(0.99)
    assert queueing.load_of(100, 0.0) == pytest.approx(0.995, abs=5e-5)


@given(st.floats(1, 1e6), st.floats(0, 5))
def test_load_of_inverts_mean_wait(factor: float, variation: float) -> None:
    load = queueing.load_of(factor, variation)
    assert 1 + queueing.mean_wait(load, variation) == pytest.approx(factor, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=50))
def test_waits_equal_the_recursion(gaps_and_services: list[tuple[float, float]]) -> None:
    gaps, services = np.array(gaps_and_services).T
    arrivals, free, expected = np.cumsum(gaps), 0.0, []
    for arrival, service in zip(arrivals, services, strict=True):
        expected.append(max(0.0, free - arrival))
        free = max(free, arrival) + service
    assert queueing.waits(arrivals, services) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_simulation_meets_the_formula(load: float, variation: float) -> None:
    found = queueing.simulate(load, variation, 400_000, seed=1)
    assert abs(found.mean - queueing.mean_wait(load, variation)) < 2 * found.half_width
    other = queueing.mean_wait(load, variation + 1)  # of another kind of service: rejected
    assert abs(found.mean - other) > 3 * found.half_width


@pytest.mark.parametrize("load", [1.0, -0.1, float("nan")])
def test_full_loads_are_refused(load: float) -> None:
    with pytest.raises(ValueError, match="load"):
        queueing.mean_wait(load)
    with pytest.raises(ValueError, match="load"):
        queueing.simulate(load)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="factor"):
        queueing.load_of(0.5)
    with pytest.raises(ValueError, match="order"):
        queueing.waits(np.array([1.0, 0.0]), np.ones(2))
    with pytest.raises(ValueError, match="customers"):
        queueing.waits(np.ones(2), np.ones(3))

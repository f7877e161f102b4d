"""One server and who waits for it: M/M/1, M/D/1 and what lies between, as formulas and as a simulation.

Customers arrive at random (Poisson), the server takes them one at a time in their order. The mean wait depends on the
service times by their mean and variance alone (Pollaczek-Khinchine): rho / (1 - rho) * (1 + c^2) / 2 service times,
with rho the load and c the standard deviation of a service over its mean; c = 1 in M/M/1, 0 in M/D/1.
Not modelled: arrivals in bursts, several servers, customers that leave.

Source: Kleinrock 1975 (Queueing Systems, volume 1), sections 3.2 and 5.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import positive, positive_int

BATCHES = 20  # of the simulated waits that an interval rests on


def _load(load: float) -> None:
    if not 0 <= load < 1:
        raise ValueError(f"load must lie in [0, 1): from 1 on the queue grows without end; got {load}")


def mean_wait(load: float, variation: float = 1.0) -> float:
    """Mean time in the queue, in service times.

    Args:
        load: rho, arrivals per service time, in [0, 1).
        variation: c, standard deviation of a service time over its mean: 1 exponential, 0 constant.

    Example:
        >>> mean_wait(0.5), mean_wait(0.5, 0.0), round(mean_wait(0.9, 0.0), 3)
        (1.0, 0.5, 4.5)
    """
    _load(load)
    positive("variation", variation, zero=True, finite=True)
    return load / (1 - load) * (1 + variation**2) / 2


def load_of(factor: float, variation: float = 1.0) -> float:
    """The load at which queue and service together take ``factor`` service times.

    Example:
        >>> round(load_of(100), 4), round(load_of(100, 0.0), 4)
        (0.99, 0.995)
    """
    if not 1 <= factor < np.inf:
        raise ValueError(f"factor must be at least 1 and finite, got {factor}")
    positive("variation", variation, zero=True, finite=True)
    odds = 2 * (factor - 1) / (1 + variation**2)
    return odds / (1 + odds)


def waits(arrivals_s: NDArray[np.float64], services_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Time in the queue of every customer (Lindley): both [customers], moments of arrival in order, and service times.

    Example:
        >>> waits(np.array([0.0, 1.0, 2.0, 9.0]), np.array([2.0, 2.0, 2.0, 2.0])).tolist()
        [0.0, 1.0, 2.0, 0.0]
    """
    if arrivals_s.shape != services_s.shape or arrivals_s.ndim != 1 or not arrivals_s.size:
        raise ValueError(f"both must be [customers], got {arrivals_s.shape} and {services_s.shape}")
    if (np.diff(arrivals_s) < 0).any() or (services_s < 0).any():
        raise ValueError("arrivals must be in their order and services not negative")
    walk = np.concatenate([[0.0], np.cumsum(services_s[:-1] - np.diff(arrivals_s))])
    return walk - np.minimum.accumulate(np.minimum(walk, 0.0))


@dataclass(frozen=True)
class Simulated:
    """Mean wait in service times and half the width of its 95 % interval, by means of batches."""

    mean: float
    half_width: float


def simulate(load: float, variation: float = 1.0, customers: int = 100_000, seed: int = 0) -> Simulated:
    """A simulated queue with gamma-distributed service times of this variation (constant for 0).

    Example:
        >>> found = simulate(0.5, 0.0)
        >>> abs(found.mean - 0.5) < 0.02
        True
    """
    from scipy.stats import t

    _load(load)
    positive("load", load)
    positive("variation", variation, zero=True, finite=True)
    positive_int("customers", customers, 10 * BATCHES)
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / load, customers))
    shape = 1 / variation**2 if variation else 0.0
    services = draw.gamma(shape, 1 / shape, customers) if variation else np.ones(customers)
    late = waits(arrivals, services)[customers % BATCHES :]
    means = late.reshape(BATCHES, -1)[1:].mean(1)  # the first batch starts empty
    half = float(t.ppf(0.975, means.size - 1)) * float(means.std(ddof=1)) / means.size**0.5
    return Simulated(float(means.mean()), half)

"""Waiting in front of one server: Pollaczek and Khinchine's formula, and Lindley's recursion for given arrivals.

rho is the load, arrivals times the mean time of a service; times are in services. Poisson arrivals, one server, first
come first served, no limit to the queue. Deterministic services are packets of one size on a link (M/D/1).

Sources: Khinchine 1932; Lindley 1952; Kleinrock 1975 (Queueing Systems I), section 5.6.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tq.systems.arguments import positive
from tq.systems.fabrics import Floats

DETERMINISTIC, EXPONENTIAL = 0.0, 1.0  # squared coefficients of variation of the services


def wait(rho: Any, variation: float = DETERMINISTIC) -> Any:
    """Mean time in the queue, in services: rho (1 + C^2) / (2 (1 - rho)) [Pollaczek-Khinchine]; rho below 1."""
    load = np.asarray(rho, float)
    positive("rho", load, zero=True, finite=True)
    positive("variation", variation, zero=True, finite=True)
    if (load >= 1).any():
        raise ValueError(f"rho must be below 1, where a queue has a mean, got {load.max():g}")
    return (load * (1 + variation) / (2 * (1 - load)))[()]


def load_for(factor: float, variation: float = DETERMINISTIC) -> float:
    """Load at which the mean time in queue and service is ``factor`` services, 1 or more: .99 for 100 with exponential
    services, .995 with deterministic ones."""
    positive("factor", factor, finite=True)
    if factor < 1:
        raise ValueError(f"factor must be at least 1, got {factor}")
    extra = 2 * (factor - 1)
    return float(extra / (1 + variation + extra))


def lindley(arrivals: Any, services: Any) -> Floats:
    """Time that each customer waits, float64 [n]: max(0, wait + service of the one before - time between the two).

    arrivals: times in order [n]; services: of each [n], or one number.
    """
    at = np.asarray(arrivals, float)
    service = np.broadcast_to(np.asarray(services, float), at.shape)
    if at.ndim != 1 or (np.diff(at) < 0).any():
        raise ValueError("arrivals must be times in order")
    steps = np.concatenate([[0.0], (service[:-1] - np.diff(at))]) if len(at) else np.zeros(0)
    walk = np.cumsum(steps)
    return walk - np.minimum.accumulate(np.minimum(walk, 0.0))

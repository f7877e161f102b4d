"""Spare nodes and slow nodes: how many to keep beside a run, and what the slowest of many costs each step.

Nodes fail independently at a constant rate and are repaired one beside the other, so the number that is in repair is
Poisson with mean nodes * repair time / mean life (Palm's theorem: whatever the distribution of repair times).
Nodes that wait fail like others. Not modelled: failures that come together, and spares that are broken when they are
needed.

Sources: Palm 1938 (the number in repair); Dean and Barroso 2013 (the slowest of many).
"""

from __future__ import annotations

from math import erfc, expm1, log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import one_number, positive, positive_int


def waiting_share(nodes: int, spares: int, node_mtbf_s: float, repair_s: float) -> float:
    """Share of the time in which more nodes are in repair than there are spares, so a run of fixed size waits.

    Args:
        nodes: that the run needs.
        spares: beside them.
        node_mtbf_s: mean seconds between failures of one node.
        repair_s: mean seconds until a failed node is back.

    Raises:
        ValueError: for an argument that is out of range.

    Example:
        >>> round(waiting_share(1000, 4, node_mtbf_s=5e7, repair_s=86_400), 4)
        0.0314
    """
    positive_int("nodes", nodes)
    positive_int("spares", spares, 0)
    one_number("node_mtbf_s", node_mtbf_s)
    positive("repair_s", repair_s, zero=True)
    return float(_waiting(nodes * repair_s / node_mtbf_s, spares)[-1])


def _waiting(mean: float, spares: int) -> NDArray[np.float64]:
    """Chance that more than 0, 1, ... spares of a Poisson number are in repair; by logarithms, whatever the mean."""
    if mean == 0:
        return np.zeros(spares + 1)
    counts = np.arange(spares + 1, dtype=np.float64)
    factorials = np.cumsum(np.log(np.maximum(counts, 1.0)))
    return np.maximum(0.0, 1 - np.cumsum(np.exp(counts * log(mean) - mean - factorials)))


def best_spares(nodes: int, node_mtbf_s: float, repair_s: float) -> int:
    """The number of spares at which idle nodes and waiting together cost least of what all nodes cost.

    Args:
        nodes: that the run needs.
        node_mtbf_s: mean seconds between failures of one node.
        repair_s: mean seconds until a failed node is back.

    Example:
        >>> best_spares(1000, node_mtbf_s=5e7, repair_s=86_400)
        7
    """
    positive_int("nodes", nodes)
    one_number("node_mtbf_s", node_mtbf_s)
    positive("repair_s", repair_s, zero=True)
    mean = nodes * repair_s / node_mtbf_s
    spares = np.arange(int(mean + 12 * sqrt(mean)) + 30)  # beyond them nothing waits any more
    useful = nodes / (nodes + spares) * (1 - _waiting(mean, len(spares) - 1))
    return int(useful.argmax())


def slow_nodes_factor(nodes: int, share: float, slowdown: float) -> float:
    """How many times as long a synchronous step takes, if any node is slow now and then.

    Args:
        nodes: that wait for each other in every step.
        share: of the time that a node is slow, independently of the others.
        slowdown: how many times as long a slow node takes, at least 1.

    Example:
        >>> round(slow_nodes_factor(1000, 0.001, 1.3), 3)
        1.19
    """
    positive_int("nodes", nodes)
    if not 0 <= share <= 1 or not slowdown >= 1:
        raise ValueError(f"share={share} must lie between 0 and 1, slowdown={slowdown} must be at least 1")
    return slowdown if share == 1 else 1 - (slowdown - 1) * expm1(nodes * log1p(-share))


def jitter_factor(nodes: int, spread: float) -> float:
    """How many times its median a synchronous step takes in the mean, if each node's time is lognormal.

    Args:
        nodes: that wait for each other in every step.
        spread: standard deviation of the logarithm of a node's time.

    Example:
        >>> round(jitter_factor(1024, 0.05), 3)
        1.177
    """
    positive_int("nodes", nodes)
    positive("spread", spread, zero=True)
    if spread == 0:
        return 1.0
    # The mean of the largest is the integral of 1 - F(x)^n, here over x = exp(spread * z).
    z = np.linspace(-9.0, 9.0 + spread, 20_001)
    middles = (z[1:] + z[:-1]) / 2
    below = np.array([0.5 * erfc(-each / sqrt(2)) for each in middles])
    return float(np.exp(spread * z[0]) + ((1 - below**nodes) * np.diff(np.exp(spread * z))).sum())

"""Failures and checkpoints as a renewal process: the share of the time that trains nothing, and the best interval.

A life lasts from one failure to the next. It begins with ``restart_s``, then works for ``interval_s`` and writes a
checkpoint for ``write_s`` in turn; what was not written when the life ends is done again. So the work of a life is
interval * floor((life - restart) / (interval + write)), and its mean is a sum over the survival function S of lives:

    waste = 1 - interval * sum_{j >= 1} S(restart + j (interval + write)) / M.

That is exact for every distribution of lives with mean M, failures while writing and restarting included. Lives are
Weibull with ``shape`` k: 1 is the exponential one, below 1 failures come in bursts.
Not modelled: failures that damage a checkpoint, slow nodes, and a rate that changes as parts age over several lives.

Sources: Daly 2006 (FGCS 22), the exponential case; Di et al. 2014, two levels, tau_i = sqrt(2 delta_i / lambda_i);
Wang et al. 2023 (Gemini, SOSP), replicas in the memory of peers.
"""

from __future__ import annotations

from math import comb, gamma

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import Real, one_number, positive, positive_int

TERMS = 200_000  # of the sum; beyond them a life is longer than any interval that is asked about
EPS = 1e-14  # of survival, below which terms are left out


def _survival(seconds: NDArray[np.float64], mtbf_s: float, shape: float) -> NDArray[np.float64]:
    return np.exp(-((seconds / (mtbf_s / gamma(1 + 1 / shape))) ** shape))


def _last(mtbf_s: float, shape: float) -> float:
    """Seconds that hardly any life lasts."""
    return float(mtbf_s / gamma(1 + 1 / shape) * (-np.log(EPS)) ** (1 / shape))


def waste(interval_s: float, write_s: float, mtbf_s: float, restart_s: float = 0.0, shape: float = 1.0) -> float:
    """Share of the time that trains nothing, between 0 and 1.

    Args:
        interval_s: seconds of work between two checkpoints.
        write_s: seconds that a checkpoint stops the run.
        mtbf_s: mean seconds between failures of the whole cluster.
        restart_s: seconds from a failure to the first new step, detection included.
        shape: of the Weibull distribution of lives; 1 is exponential.

    Raises:
        ValueError: for an argument that is not positive (restart_s may be 0), or an interval so short against the lives
            that the sum would have more than 200,000 terms.

    Example:
        >>> round(waste(1116.19, 60, 11_133, 600), 5)
        0.14747
    """
    for name, value in (("interval_s", interval_s), ("write_s", write_s), ("mtbf_s", mtbf_s), ("shape", shape)):
        one_number(name, value)
    positive("restart_s", restart_s, zero=True)
    cycle = interval_s + write_s
    if shape == 1:
        return float(1 - interval_s / (mtbf_s * np.exp(restart_s / mtbf_s) * np.expm1(cycle / mtbf_s)))
    terms = int(_last(mtbf_s, shape) / cycle) + 1
    if terms > TERMS:
        raise ValueError(f"interval_s={interval_s:g} is too short against mtbf_s={mtbf_s:g} at shape={shape:g}")
    ends = restart_s + cycle * np.arange(1, terms + 1, dtype=np.float64)
    return float(1 - interval_s * _survival(ends, mtbf_s, shape).sum() / mtbf_s)


def _root(delta: float) -> float:
    """1 + W0(-exp(-delta - 1)): where ln(1 - x) + x + delta = 0 between 0 and 1, by bisection to the last digit."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if np.log1p(-middle) + middle + delta > 0 else (low, middle)
    return middle


def best_interval_s(write_s: float, mtbf_s: float, restart_s: float = 0.0, shape: float = 1.0) -> float:
    """The interval that wastes least, in seconds: M (1 + W0(-exp(-write / M - 1))) for exponential lives, where the
    restart does not matter, else found by search.

    Args:
        write_s: seconds that a checkpoint stops the run.
        mtbf_s: mean seconds between failures.
        restart_s: seconds from a failure to the first new step.
        shape: of the Weibull distribution of lives.

    Raises:
        ValueError: for an argument that is not positive (restart_s may be 0).
        ModuleNotFoundError: without SciPy, for another shape than 1.

    Example:
        >>> round(best_interval_s(60, 11_133), 2)
        1116.19
    """
    for name, value in (("write_s", write_s), ("mtbf_s", mtbf_s), ("shape", shape)):
        one_number(name, value)
    exact = mtbf_s * _root(write_s / mtbf_s)
    if shape == 1:
        return exact
    from scipy.optimize import minimize_scalar

    low, high = np.log(exact / 30), np.log(exact * 30)
    found = minimize_scalar(
        lambda x: waste(float(np.exp(x)), write_s, mtbf_s, restart_s, shape), bounds=(low, high), method="bounded",
        options={"xatol": 1e-6},
    )  # fmt: skip
    return float(np.exp(found.x))


def simulated_waste(
    interval_s: float, write_s: float, mtbf_s: float, restart_s: float = 0.0, *, shape: float = 1.0,
    lives: int = 1_000_000, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """(waste, its standard error) over so many simulated lives: what ``waste`` is checked with.

    Args:
        interval_s: seconds of work between two checkpoints.
        write_s: seconds that a checkpoint stops the run.
        mtbf_s: mean seconds between failures.
        restart_s: seconds from a failure to the first new step.
        shape: of the Weibull distribution of lives.
        lives: how many are drawn.
        seed: of the draws.

    Example:
        >>> share, error = simulated_waste(1116.19, 60, 11_133, 600, lives=200_000)
        >>> abs(share - 0.14747) < 4 * error
        True
    """
    positive_int("lives", lives, 2)
    drawn = np.random.default_rng(seed).weibull(shape, lives) * (mtbf_s / gamma(1 + 1 / shape))
    work = interval_s * np.floor(np.maximum(drawn - restart_s, 0.0) / (interval_s + write_s))
    kept = work.mean() / drawn.mean()
    error = (work - kept * drawn).std(ddof=1) / (drawn.mean() * np.sqrt(lives))
    return float(1 - kept), float(error)


def two_levels(write_s: tuple[float, float], mtbf_s: tuple[float, float], restart_s: Real = 0.0) -> dict[str, float]:
    """Checkpoints to a near and to a far place, by the first-order model.

    Args:
        write_s: seconds of a checkpoint near (memory of a peer) and far (a file system).
        mtbf_s: mean seconds between failures that the near one mends, and between those that need the far one.
        restart_s: seconds from a failure to the first new step.

    Returns:
        ``near_s`` and ``far_s``, the intervals sqrt(2 write mtbf), and ``waste``, the share of the time lost.

    Example:
        >>> {name: round(value, 3) for name, value in two_levels((1, 60), (12_000, 160_000)).items()}
        {'near_s': 154.919, 'far_s': 4381.78, 'waste': 0.04}
    """
    positive("restart_s", restart_s, zero=True)
    intervals = []
    lost = 0.0
    for delta, mean in zip(write_s, mtbf_s, strict=True):
        one_number("write_s", delta)
        one_number("mtbf_s", mean)
        intervals.append(float(np.sqrt(2 * delta * mean)))
        lost += delta / intervals[-1] + (intervals[-1] / 2 + restart_s) / mean
    return {"near_s": intervals[0], "far_s": intervals[1], "waste": float(lost)}


def survives(nodes: int, lost: int, placement: str = "pairs") -> float:
    """Chance that every lost node's state is still in the memory of a peer, when so many nodes fail at once.

    Args:
        nodes: of the cluster; an even number for pairs.
        lost: nodes that fail together, each set of them as likely as another.
        placement: "pairs", two nodes hold each other's state; "ring", each node's state is held by the next one.

    Returns:
        A probability: pairs lose nothing while no pair is lost whole, a ring while no two neighbours are.

    Raises:
        ValueError: for an odd number of nodes in pairs, more lost nodes than there are, or another placement.

    Example:
        >>> [round(survives(16, lost, "pairs"), 3) for lost in (1, 2, 3)]
        [1.0, 0.933, 0.8]
    """
    positive_int("nodes", nodes, 2)
    positive_int("lost", lost, 0)
    if lost > nodes:
        raise ValueError(f"lost={lost} is more than nodes={nodes}")
    if placement == "pairs":
        if nodes % 2:
            raise ValueError(f"nodes={nodes} cannot be paired; an even number is needed")
        good = comb(nodes // 2, lost) * 2**lost
    elif placement == "ring":
        apart = lost == 0 or 2 * lost <= nodes
        good = (nodes * comb(nodes - lost, lost) // (nodes - lost) if lost < nodes else 0) if apart else 0
    else:
        raise ValueError(f"placement={placement!r}: accepted are pairs and ring")
    return good / comb(nodes, lost)

"""What waiting costs: the slowest of n ranks, the best number of processors, and messages whose volume grows with n.

A synchronous step takes as long as its slowest rank. For jitter of standard deviation sigma the mean of the slowest of
n lies z_n sigma above the mean of one, where z_n depends on the tail: it grows like sqrt(2 ln n) for a normal tail and
like ln n for an exponential one. Not modelled: jitter that ranks share, and ranks that differ (see ``stragglers``).

Sources: David and Nagaraja 2003 (Order Statistics), chapters 2 and 3; Chen et al. 2016 (Revisiting Distributed
Synchronous SGD) for backup workers; Lin et al. 2018 (Deep Gradient Compression) for sparse messages.

Shapes: s samples of the time of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import one_of, positive, positive_int

KINDS = ("normal", "exponential")
_GRID = np.linspace(-12.0, 12.0, 24_001)  # of a standard normal number: the trapezoid rule is exact to 1e-12 on it


def expected_order(ranks: int, place: int, kind: str = "normal") -> float:
    """Mean of the ``place``-th smallest of independent standardized numbers (mean 0, standard deviation 1).

    Args:
        ranks: how many numbers.
        place: 1 for the smallest, ``ranks`` for the largest; ranks - k is what k backup workers leave.
        kind: "normal", or "exponential" (shifted to mean 0).

    Raises:
        ValueError: for a place or a kind that is not there.

    Example:
        >>> round(expected_order(8, 8), 4), round(expected_order(8, 7), 4)
        (1.4236, 0.8522)
        >>> round(expected_order(3, 3, "exponential"), 4)  # 1 + 1/2 + 1/3, less the mean
        0.8333
    """
    positive_int("ranks", ranks)
    positive_int("place", place)
    one_of("kind", kind, KINDS)
    if place > ranks:
        raise ValueError(f"place must be at most ranks={ranks}, got {place}")
    if kind == "exponential":
        return float(np.sum(1.0 / np.arange(ranks - place + 1, ranks + 1))) - 1.0
    from scipy.special import betainc, ndtr

    below = betainc(place, ranks - place + 1, ndtr(_GRID))  # P(the place-th smallest <= x)
    return float(_GRID[-1] - np.trapezoid(below, _GRID))


def expected_max(ranks: int, kind: str = "normal") -> float:
    """z_n: mean of the largest of n standardized numbers, in standard deviations.

    Example:
        >>> [round(expected_max(n), 4) for n in (8, 64, 1024, 10_000, 24_576)]
        [1.4236, 2.3437, 3.2482, 3.8516, 4.0673]
        >>> round(expected_max(8, "exponential") + 1, 4)  # the harmonic number
        2.7179
    """
    return expected_order(ranks, ranks, kind)


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, in the unit of the samples."""

    mean: float
    low: float
    high: float


def extrapolated_max(
    samples_s: Sequence[float] | NDArray[np.float64], ranks: int, kind: str = "normal", seed: int = 0
) -> Interval:
    """Mean time of the slowest of ``ranks`` from times of single ranks: mean + standard deviation * z_n.

    Args:
        samples_s: [s] times of one rank, at least 8, in any unit.
        ranks: to extrapolate to.
        kind: of the tail, which few samples cannot tell; compare both.
        seed: of the 2,000 bootstrap draws behind the interval, which holds for a right ``kind`` only.

    Example:
        >>> times = np.random.default_rng(0).normal(100, 2, 4000)
        >>> found = extrapolated_max(times, 24_576)
        >>> found.low < 100 + 2 * 4.0673 < found.high, found.high - found.low < 0.6
        (True, True)
    """
    samples = np.asarray(samples_s, dtype=np.float64)
    if samples.ndim != 1 or samples.size < 8 or not np.isfinite(samples).all():
        raise ValueError(f"samples_s must be at least 8 finite numbers, got shape {samples.shape}")
    positive_int("ranks", ranks)
    z = expected_max(ranks, kind)
    draws = np.random.default_rng(seed).integers(0, samples.size, (2000, samples.size), dtype=np.int32)
    again = samples[draws]
    ends = np.quantile(again.mean(1) + z * again.std(1, ddof=1), (0.025, 0.975))
    return Interval(float(samples.mean() + z * samples.std(ddof=1)), float(ends[0]), float(ends[1]))


def waiting_share(ranks: int, spread: float, kind: str = "normal") -> float:
    """Share of a synchronous step that the mean rank waits, for a spread (standard deviation over mean).

    Example:
        >>> round(waiting_share(10_000, 0.02), 4)
        0.0715
    """
    positive("spread", spread, zero=True, finite=True)
    late = spread * expected_max(ranks, kind)
    return late / (1 + late)


@dataclass(frozen=True)
class Scaling:
    """T(n) = W / n + a n + b log2 n: work that is shared, a cost that grows with every processor, and a tree's.

    Attributes:
        work_s: W, seconds of one processor without the others.
        per_rank_s: a, of a barrier that one processor keeps.
        per_doubling_s: b, of a barrier by a tree.

    Example:
        >>> law = Scaling(100.0, 0.01)
        >>> law.best, law.seconds(100) < law.seconds(50), law.seconds(100) < law.seconds(200)
        (100.0, True, True)
    """

    work_s: float
    per_rank_s: float
    per_doubling_s: float = 0.0

    def __post_init__(self) -> None:
        positive("work_s", self.work_s, finite=True)
        positive("per_rank_s", self.per_rank_s, zero=True, finite=True)
        positive("per_doubling_s", self.per_doubling_s, zero=True, finite=True)

    def seconds(self, ranks: float) -> float:
        """T(n), n at least 1 and not necessarily whole."""
        if not ranks >= 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        return self.work_s / ranks + self.per_rank_s * ranks + self.per_doubling_s * math.log2(ranks)

    @property
    def best(self) -> float:
        """n*, where more processors make it slower: sqrt(W / a) where b = 0; infinite where nothing grows."""
        tree = self.per_doubling_s / math.log(2)
        if not self.per_rank_s:
            return self.work_s / tree if tree else math.inf
        return (math.sqrt(tree * tree + 4 * self.per_rank_s * self.work_s) - tree) / (2 * self.per_rank_s)


def fit_scaling(ranks: Sequence[int], seconds: Sequence[float]) -> Scaling:
    """W, a and b >= 0 whose relative errors at the given points are the least (non-negative least squares).

    Example:
        >>> law = Scaling(100.0, 0.01, 0.1)
        >>> found = fit_scaling([1, 2, 4, 8, 64], [law.seconds(n) for n in (1, 2, 4, 8, 64)])
        >>> round(found.work_s, 3), round(found.per_rank_s, 5), round(found.per_doubling_s, 4)
        (100.0, 0.01, 0.1)
    """
    from scipy.optimize import nnls

    n, took = np.asarray(ranks, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if n.shape != took.shape or n.size < 3 or (n < 1).any() or not (took > 0).all():
        raise ValueError("ranks and seconds must be at least three pairs, of counts from 1 on and positive times")
    terms = np.stack([1 / n, n, np.log2(n)], 1) / took[:, None]
    work, per_rank, per_doubling = nnls(terms, np.ones(n.size))[0]
    return Scaling(float(work), float(per_rank), float(per_doubling))


def sparse_bytes(
    numbers: float, ranks: int, share: float, number_bytes: float = 2.0, index_bytes: float = 4.0
) -> float:
    """Bytes that a rank sends if every rank's largest entries go to all others: (n - 1) * kept * (value + index).

    Each rank keeps other entries, so nothing can be summed on the way and the volume grows with n.

    Args:
        numbers: elements of the gradient.
        ranks: n.
        share: of the elements that are kept, at most 1.
        number_bytes, index_bytes: of a value (fp16) and of its index (int32).

    Example:
        >>> sparse_bytes(1e6, 2, 0.001), sparse_bytes(1e6, 64, 0.001)
        (6000.0, 378000.0)
    """
    positive("numbers", numbers, finite=True)
    positive_int("ranks", ranks)
    positive("share", share, most=1.0)
    for name, value in (("number_bytes", number_bytes), ("index_bytes", index_bytes)):
        positive(name, value, zero=True, finite=True)
    return (ranks - 1) * share * numbers * (number_bytes + index_bytes)


def sparse_factor(ranks: int, share: float, kept_bits: float = 48.0) -> float:
    """How many times fewer bytes than a ring all-reduce in fp32 such an all-gather sends: 64 / (n share bits).

    Example:
        >>> round(sparse_factor(2, 0.001, 64)), round(sparse_factor(64, 0.001, 64), 1)
        (500, 15.6)
    """
    positive_int("ranks", ranks, 2)
    positive("share", share, most=1.0)
    positive("kept_bits", kept_bits, finite=True)
    return 64.0 / (ranks * share * kept_bits)


def sparse_crossing(share: float, bits: float = 4.25, kept_bits: float = 48.0) -> float:
    """n at which the all-gather of sparse entries sends what both phases of a quantized all-reduce send: 2 bits /
    (share * kept_bits). Below it the sparse one sends less.

    Args:
        share: of the elements that are kept.
        bits: of a quantized element with its share of a scale.
        kept_bits: of a kept element with its index.

    Example:
        >>> round(sparse_crossing(0.001, kept_bits=64)), round(sparse_crossing(0.001))
        (133, 177)
    """
    positive("share", share, most=1.0)
    positive("bits", bits, finite=True)
    positive("kept_bits", kept_bits, finite=True)
    return 2 * bits / (share * kept_bits)

"""Whether runs are equivalent within a margin fixed beforehand, several at once, and whether intervals cover zero where
nothing differs.

An interval that holds zero shows nothing: a few noisy pairs always give one. Two one-sided tests (Schuirmann 1987) ask
instead whether the difference is shown to be smaller than the margin, and noise makes that harder.

Shapes: n pairs that share their seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tq.lab.stats import number

LEVEL = 0.05  # of each one-sided test, and of all arms of a figure together
ENOUGH_NULLS = 40  # pairs without a difference that a coverage is counted from
COVERED = (0.88, 0.99)  # where the coverage of a 95 % interval may lie
BIASED = 1e-3  # p of a t test below which the mean of nulls is not zero


@dataclass(frozen=True)
class Equivalence:
    """mean: of n paired differences. low, high: their 90 % interval, inside (-margin, margin) where ``holds``.

    p: the larger of the two one-sided tests'; that of ``holm`` where several arms are judged together.
    """

    mean: float
    low: float
    high: float
    margin: float
    p: float
    n: int

    @property
    def holds(self) -> bool:
        return self.p < LEVEL

    def __str__(self) -> str:
        said = "equivalent" if self.holds else "not shown to be equivalent"
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}], {said} within {self.margin:g} (p = {self.p:.2g})"


def equivalence(losses: Sequence[float], baseline: Sequence[float], margin: float) -> Equivalence:
    """Two one-sided t tests of paired differences; both in the order of the seeds, at least two.

    A run that is no longer finite is equivalent to nothing: p = 1.
    """
    from scipy.stats import t, ttest_1samp

    margin = number("margin", margin)
    if margin <= 0:
        raise ValueError(f"margin must be positive, got {margin!r}")
    differences = np.array([a - b for a, b in zip(losses, baseline, strict=True)], dtype=np.float64)
    n = len(differences)
    if n < 2:
        raise ValueError(f"losses: {n} pairs; a test needs two at least")
    if not np.isfinite(differences).all():
        return Equivalence(math.nan, math.nan, math.nan, margin, 1.0, n)
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    if deviation == 0:  # the same to the last bit in all pairs, or moved by as much in all
        return Equivalence(mean, mean, mean, margin, float(abs(mean) >= margin), n)
    half = float(t.ppf(1 - LEVEL, n - 1)) * deviation / math.sqrt(n)
    above = ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = ttest_1samp(differences, margin, alternative="less").pvalue
    return Equivalence(mean, mean - half, mean + half, margin, float(max(above, below)), n)


def differs(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """p of the two-sided t test that paired differences have mean zero; both in the order of the seeds, at least two.

    ValueError for a run that is no longer finite: it has no difference.
    """
    from scipy.stats import ttest_1samp

    differences = [number("losses", a - b) for a, b in zip(losses, baseline, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"losses: {len(differences)} pairs; a test needs two at least")
    if len(set(differences)) == 1:  # the same in all pairs
        return float(differences[0] == 0)
    return float(ttest_1samp(differences, 0.0).pvalue)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p values adjusted for their number (Holm 1979): those below ``LEVEL`` hold together with that error at most."""
    order, worst, found = sorted(p, key=lambda name: number(name, p[name])), 0.0, {}
    for place, name in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - place) * p[name]))
        found[name] = worst
    return {name: found[name] for name in p}


def pairs_needed(deviation: float, margin: float, power: float = 0.9, expected: float = 0.0) -> int:
    """The least n >= 2 at which the tests pass with this probability, for differences of this standard deviation.

    expected: the true difference, smaller than the margin. By t quantiles in the place of the non-central t, which is
    right to a pair or two.
    """
    from scipy.stats import t

    deviation, margin = number("deviation", deviation), number("margin", margin)
    room = margin - abs(number("expected", expected))
    if deviation < 0 or room <= 0 or not 0 < power < 1:
        raise ValueError(
            f"deviation must be at least 0, |expected| below margin and power in (0, 1), got {deviation!r}, "
            f"{expected!r} below {margin!r}, {power!r}"
        )
    missed = (1 - power) / 2 if expected == 0 else 1 - power  # in the middle either test may fail
    n = 2
    while room < (t.ppf(1 - LEVEL, n - 1) + t.ppf(1 - missed, n - 1)) * deviation / math.sqrt(n):
        n += 1
    return n


def coverage(nulls: Sequence[float], n: int, draws: int = 4000, seed: int = 0) -> float:
    """Share of 95 % Student intervals that hold zero, each over n of these differences between runs without one.

    Either run of a pair may be the first, so every drawn difference has a sign at random: else the mean of the few that
    were measured, which is luck, would move the share by several per cent.

    nulls: at least ``ENOUGH_NULLS``, of which each draw takes n without putting back. ValueError where a t test at
    ``BIASED`` finds their mean off zero: then the two runs of a pair differ in more than luck.
    """
    from scipy.stats import t, ttest_1samp

    pool = np.array([number("nulls", value) for value in nulls])
    if len(pool) < ENOUGH_NULLS or not 2 <= n <= len(pool):
        raise ValueError(f"at least {ENOUGH_NULLS} nulls are needed and n in 2 ... their number, got {len(pool)}, {n}")
    if pool.any() and ttest_1samp(pool, 0.0).pvalue < BIASED:
        raise ValueError(f"nulls: their mean {pool.mean():.2g} is not zero, so the runs of a pair differ in something")
    generator = np.random.default_rng(seed)
    drawn = generator.permuted(np.tile(pool, (draws, 1)), axis=1)[:, :n] * generator.choice((-1.0, 1.0), (draws, n))
    half = t.ppf(0.975, n - 1) * drawn.std(axis=1, ddof=1) / math.sqrt(n)
    return float((np.abs(drawn.mean(axis=1)) <= half).mean())


def calibrated(share: float) -> bool:
    """Whether a coverage is where that of a 95 % interval may lie."""
    return COVERED[0] <= share <= COVERED[1]

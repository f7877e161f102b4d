"""Whether runs are no worse than a baseline by more than a margin fixed beforehand: one side of an equivalence test.

Where a pilot puts an arm below its baseline, no number of pairs shows equivalence, and whether it is worse is the
question that is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tq.lab.equivalence import LEVEL
from tq.lab.stats import number


@dataclass(frozen=True)
class NonInferiority:
    """mean: of n paired differences. high: their one-sided 95 % limit, below ``margin`` where ``holds`` by itself.

    p: of the one-sided t test; that of ``equivalence.holm`` where several arms are judged together.
    """

    mean: float
    high: float
    margin: float
    p: float
    n: int

    @property
    def holds(self) -> bool:
        return self.p < LEVEL

    def __str__(self) -> str:
        said = "no worse" if self.holds else "not shown to be no worse"
        return f"{self.mean:+.4f}, below {self.high:+.4f}: {said} than {self.margin:+g} (p = {self.p:.2g})"


def non_inferiority(losses: Sequence[float], baseline: Sequence[float], margin: float) -> NonInferiority:
    """One-sided t test that paired differences lie below the margin; both in the order of the seeds, at least two.

    A run that is no longer finite is worse than anything: p = 1. ValueError for a margin that is not positive.
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
        return NonInferiority(math.nan, math.nan, margin, 1.0, n)
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    if deviation == 0:  # moved by as much in all pairs
        return NonInferiority(mean, mean, margin, float(mean >= margin), n)
    high = mean + float(t.ppf(1 - LEVEL, n - 1)) * deviation / math.sqrt(n)
    p = float(ttest_1samp(differences, margin, alternative="less").pvalue)
    return NonInferiority(mean, high, margin, p, n)

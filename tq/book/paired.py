"""Gaps between runs that share their seeds, with Student intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """Mean of paired differences over seeds; half_width: of its 95 % confidence interval (Student), nan for n = 1."""

    mean: float
    half_width: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (f" ± {self.half_width:.4f}" if self.n > 1 else "")

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def gap(losses: Sequence[float], baseline: Sequence[float]) -> Gap:
    """Paired: both in the order of the seeds. Differences that are not finite make the gap so."""
    from scipy.stats import t

    differences = [a - b for a, b in zip(losses, baseline, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    if n == 1:
        return Gap(mean, math.nan, 1)
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    return Gap(mean, float(t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), n)

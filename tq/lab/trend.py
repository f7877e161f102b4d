"""How a loss gap moves with a size: a line against its logarithm, and whether it foretells a point it has not seen.

Points have errors of their own, known from their pairs, so the line is fitted by weighted least squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tq.lab.stats import Gap, number


@dataclass(frozen=True)
class Trend:
    """gap = level + slope * (log10(x) - centre); errors: standard errors of level and slope, which are independent.

    slope: nats for each factor of ten. pairs: over all points.
    """

    level: float
    slope: float
    centre: float
    errors: tuple[float, float]
    pairs: int
    freedom: int

    def at(self, x: float) -> Gap:
        """The gap that the line foretells at x, with the half-width of its 95 % interval."""
        away = math.log10(_positive(x)) - self.centre
        error = math.hypot(self.errors[0], self.errors[1] * away)
        return Gap(self.level + self.slope * away, self._quantile() * error, self.pairs)

    @property
    def rise(self) -> Gap:
        """The slope with the half-width of its 95 % interval."""
        return Gap(self.slope, self._quantile() * self.errors[1], self.pairs)

    def foretells(self, x: float, differences: Sequence[float]) -> bool:
        """Whether the mean of paired differences at x lies where the line says, by the 95 % intervals of both."""
        mean, error = _mean_and_error(differences)
        line = self.at(x)
        return abs(mean - line.mean) <= math.hypot(line.half_width, _t(len(differences) - 1) * error)

    def _quantile(self) -> float:
        return _t(self.freedom)


def fitted(differences: Mapping[float, Sequence[float]]) -> Trend:
    """The line through the means of paired differences in nats, by x > 0: two different x, two pairs each, at least."""
    points = [(math.log10(_positive(x)), *_mean_and_error(pairs)) for x, pairs in differences.items()]
    if len(points) < 2:
        raise ValueError(f"differences: {len(points)} points; a line needs two at least")
    if any(error == 0 for _, _, error in points):
        raise ValueError("differences: a point without any spread has no weight")
    weights = [error**-2 for _, _, error in points]
    whole = sum(weights)
    centre = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / whole
    level = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / whole
    spread = sum(w * (x - centre) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - centre) * y for w, (x, y, _) in zip(weights, points, strict=True)) / spread
    pairs = sum(len(each) for each in differences.values())
    return Trend(level, slope, centre, (whole**-0.5, spread**-0.5), pairs, pairs - len(points))


def _mean_and_error(differences: Sequence[float]) -> tuple[float, float]:
    found = [number("differences", value) for value in differences]
    if len(found) < 2:
        raise ValueError(f"differences: {len(found)} pairs; two at least are needed")
    mean = sum(found) / len(found)
    return mean, math.sqrt(sum((d - mean) ** 2 for d in found) / (len(found) - 1) / len(found))


def _positive(x: float) -> float:
    if not number("x", x) > 0:
        raise ValueError(f"x must be positive, got {x!r}")
    return x


def _t(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))

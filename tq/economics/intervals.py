"""A number with what it may be instead: low, mid, high. How likely the truth lies between is said where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """low <= mid <= high, all finite."""

    low: float
    mid: float
    high: float

    def __post_init__(self) -> None:
        for name in ("low", "mid", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if not self.low <= self.mid <= self.high:
            raise ValueError(f"an interval needs low <= mid <= high, got {self.low}, {self.mid}, {self.high}")

    @classmethod
    def exactly(cls, value: float) -> Interval:
        return cls(value, value, value)

    def __mul__(self, factor: float) -> Interval:
        """Times a number that is not negative."""
        if factor < 0 or not math.isfinite(factor):
            raise ValueError(f"an interval can be multiplied by 0 or more, got {factor!r}")
        return Interval(self.low * factor, self.mid * factor, self.high * factor)

    __rmul__ = __mul__

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

"""Checks of arguments at the door; each error names the argument, the value received and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: A number, or an array of samples of an uncertain one. Arrays of one call must broadcast together.
Real = Any


def positive_int(name: str, value: object, low: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be an int of at least {low}, got {value}")


def positive(name: str, value: Real, zero: bool = False, most: float = np.inf) -> None:
    """value: a number or an array of them, finite unless `most` is inf, then inf is accepted; NaN never is."""
    array = np.asarray(value)
    bound = "0 or more" if zero else "positive"
    bound += f" and at most {most:g}" if most < np.inf else ""
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a number or an array of numbers, {bound}; got {value!r}")
    good = (array >= 0 if zero else array > 0) & (array <= most)
    if not np.all(good):
        shown = value if array.ndim == 0 else array[~good].flat[0]
        raise ValueError(f"{name} must be {bound}, got {shown}")


def one_of(name: str, value: object, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")

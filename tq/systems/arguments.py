"""Checks of arguments at the door; each error names the argument, the value received and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MOST = 10**12  # of a count; beyond, products of counts are no longer exact
#: A number, or an array of samples of an uncertain one. Arrays of one call must broadcast together.
Real = Any


def positive_int(name: str, value: object, low: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be an int of at least {low}, got {value}")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST:.0e}")


def positive(name: str, value: Real, zero: bool = False, most: float = np.inf, finite: bool = False) -> None:
    """value: a number or an array of them. inf is accepted where `most` is inf and not `finite`; NaN never is."""
    array = np.asarray(value)
    bound = ("0 or more" if zero else "positive") + (" and finite" if finite and most == np.inf else "")
    bound += f" and at most {most:g}" if most < np.inf else ""
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a number or an array of numbers, {bound}; got {value!r}")
    good = (array >= 0 if zero else array > 0) & (array <= most) & (np.isfinite(array) | (not finite))
    if not np.all(good):
        shown = value if array.ndim == 0 else array[~good].flat[0]
        raise ValueError(f"{name} must be {bound}, got {shown}")


def one_number(name: str, value: object) -> None:
    """value: one finite positive number, no array."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a positive number, got {value!r}")
    if not 0 < value < np.inf:
        raise ValueError(f"{name} must be a finite positive number, got {value}")


def boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def instance(name: str, value: object, kind: type, none: bool = False) -> None:
    if not (isinstance(value, kind) or (none and value is None)):
        raise TypeError(f"{name} must be {'None or ' if none else ''}{kind.__name__}(...), got {value!r}")


def one_of(name: str, value: object, accepted: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")

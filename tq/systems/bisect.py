"""The largest size that still fits, where only trying tells: a batch in a GPU's memory, a rate on a fine grid."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int = 1 << 16) -> int:
    """The largest n <= `most` with `fits(n)`, by doubling and halving; 0 where not even one does.

    fits: True up to some n and False from there on; called about 2 log2(n) times.
    """
    if most < 1:
        raise ValueError(f"most={most}: must be >= 1")
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good

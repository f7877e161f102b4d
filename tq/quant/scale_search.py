"""The search over scale multipliers of a block: which are tried, and how a trial is judged.

A multiplier m gives the codes of m u, u a rotated block of unit variance; the best one has the largest cosine with u.
With up to ``INTEGER_BITS`` bits the cosines are taken in integers, which costs a fraction of the time and less than one
percent of the error, and makes the sums exact in any order: magnitudes in steps of 1/32 of a unit, at most 127;
thresholds rounded down to such steps; levels in steps of the largest / 63. What is coded at last is u m in full
precision. The search is this project's; chapter distortion measures it.

Shapes: K multipliers, L = 2**bits levels, of which H = L / 2 positive, B block size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

INTEGER_BITS = 4  # up to which trials are judged in integers
STEPS = 32  # of a unit, in a magnitude
TOP = 127  # the largest magnitude in steps
_TOP_LEVEL = 63  # two products of a magnitude and a level, and two of those, fit 16 bits
CELL = 8  # steps in which one threshold may lie, so that a table of 16 entries finds it


class Search(NamedTuple):
    """What an encoder tries. cuts: K * (H - 1) and levels: H integers as said above; empty from 5 bits on.

    The index of a magnitude a is the number of cuts below it.
    """

    multipliers: tuple[float, ...]
    cuts: tuple[tuple[int, ...], ...] = ()
    levels: tuple[int, ...] = ()


ONE = Search((1.0,))  # no search


def multipliers(count: int) -> tuple[float, ...]:
    """The ``count`` multipliers, 1 among them: even steps over 1 +- .15 (up to three), .2 (up to eight) or .25.

    Of an even number the lowest is left out.
    """
    if count == 1:
        return (1.0,)
    reach = 0.15 if count <= 3 else 0.2 if count <= 8 else 0.25
    sides = count // 2
    return tuple(1.0 + reach * k / sides for k in range(sides + 1 - count, sides + 1))


def _cuts(thresholds: np.ndarray, multiplier: float) -> tuple[int, ...]:
    """The positive thresholds / multiplier in steps; where two meet in a cell, the second waits for the cell's end."""
    found: list[int] = []
    for threshold in thresholds:
        cut = min(TOP, int(STEPS * float(threshold) / multiplier))
        if found and found[-1] // CELL == cut // CELL:
            cut = cut // CELL * CELL + CELL - 1
        found.append(cut)
    return tuple(found)


@lru_cache(maxsize=256)
def search(count: int, bits: int, levels: bytes, thresholds: bytes) -> Search:
    """The search over ``count`` multipliers with these levels and thresholds, fp32 [L] and [L - 1] as bytes."""
    tried = multipliers(count)
    if count == 1 or bits > INTEGER_BITS:
        return Search(tried)
    half = 1 << (bits - 1)
    positive = np.frombuffer(levels, np.float32)[half:].astype(np.float64)
    above_zero = np.frombuffer(thresholds, np.float32)[half:].astype(np.float64)
    whole = tuple(int(n) for n in np.rint(positive / positive[-1] * _TOP_LEVEL))
    return Search(tried, tuple(_cuts(above_zero, m) for m in tried), whole)

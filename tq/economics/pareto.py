"""The offers that nobody beats in both time and money."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def front(hours: ArrayLike, usd: ArrayLike) -> NDArray[np.bool_]:
    """[n] bools: True where no offer is at most as slow and at most as dear, and better in one. Equal ones stay."""
    time, cost = np.asarray(hours, float), np.asarray(usd, float)
    if time.ndim != 1 or time.shape != cost.shape:
        raise ValueError(f"hours and usd must be lists of one length, got shapes {time.shape} and {cost.shape}")
    if not (np.all(np.isfinite(time)) and np.all(np.isfinite(cost))):
        raise ValueError("hours and usd must be finite")
    order = np.lexsort((cost, time))
    t, c = time[order], cost[order]
    # cheapest among the strictly faster, and cheapest among the equally fast
    first = np.searchsorted(t, t, side="left")
    before = np.concatenate(([np.inf], np.minimum.accumulate(c)))[first]
    keep = np.empty(len(t), bool)
    keep[order] = (c < before) & (c == c[first])
    return keep

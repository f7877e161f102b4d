"""Chains of layers that are checkpointed: how many forward passes a memory costs, by exact dynamic programs.

A chain keeps what its first layer was given, and a few results on the way; everything else is computed again from the
last one that is kept before it, more than once if need be. Not modelled: branches, codes, and layers whose parts are
kept one by one (``tq.systems.rematerialization``).

Sources: Griewank & Walther 2000 (revolve, TOMS 26), equal layers; Beaumont et al. 2019 (Rotor, arXiv:1911.13214),
layers of different sizes and times; Chen et al. 2016 (arXiv:1604.06174), one more forward pass in O(sqrt(L)) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, comb, inf, isqrt, sqrt
from typing import NamedTuple

import numpy as np

from tq.systems.arguments import positive, positive_int


def extra_forwards(layers: int, slots: int) -> int:
    """Layers that run once more, or oftener, at least, to reverse a chain of equal layers. By dynamic program.

    Args:
        layers: of the chain.
        slots: results of a layer that can be kept at once, the chain's own input among them.

    Raises:
        ValueError: an argument is no positive integer.

    Example:
        >>> [extra_forwards(10, 3), extra_forwards(96, 6), extra_forwards(96, 96)]
        [15, 264, 95]
    """
    positive_int("layers", layers)
    positive_int("slots", slots)
    best = np.arange(layers + 1) * (np.arange(layers + 1) - 1) // 2  # one slot: from the start each time
    for _ in range(slots - 1):
        fewer, best = best, np.zeros_like(best)
        for length in range(2, layers + 1):  # run to a place, keep it, reverse what follows, then what is before
            place = np.arange(1, length)
            best[length] = (place + fewer[length - place] + best[place]).min()
    return int(best[layers])


def extra_forwards_formula(layers: int, slots: int) -> int:
    """The same in closed form: r L - C(s + r, r - 1) for the smallest r with C(s + r, r) >= L."""
    positive_int("layers", layers)
    positive_int("slots", slots)
    rounds = 0
    while comb(slots + rounds, rounds) < layers:
        rounds += 1
    return rounds * layers - comb(slots + rounds, rounds - 1) if rounds else 0


class Segments(NamedTuple):
    """length: layers from one checkpoint to the next; peak: layers' memory at most, checkpoints included."""

    length: int
    peak: float


def square_root(layers: int, checkpoint: float = 1.0, layer: float = 1.0) -> Segments:
    """The distance of equally spaced checkpoints with the lowest peak, for one more forward pass.

    Args:
        layers: of the chain.
        checkpoint: bytes of a checkpoint.
        layer: bytes that a layer keeps while it is run again.

    Returns:
        Segments; for equal bytes the peak is about ``2 * sqrt(layers)``.

    Raises:
        ValueError: an argument is not positive.

    Example:
        >>> square_root(96)
        Segments(length=10, peak=20.0)
    """
    positive_int("layers", layers)
    positive("checkpoint", checkpoint)
    positive("layer", layer)
    middle = sqrt(layers * checkpoint / layer)
    near = {1, layers} | {n for n in (isqrt(layers), int(middle), ceil(middle)) if 1 <= n <= layers}
    return min((Segments(n, ceil(layers / n) * checkpoint + n * layer) for n in near), key=lambda found: found.peak)


class Stage(NamedTuple):
    """A layer of a chain. forward_s, backward_s: seconds; given: units of memory of its input; kept: of all that it
    keeps for backward, its input included."""

    forward_s: float
    backward_s: float
    given: int
    kept: int


def chain_seconds(stages: Sequence[Stage], memory: int) -> float:
    """Least seconds of a forward and backward pass over a chain of different layers; inf where none fits.

    Each layer keeps all, or keeps nothing and runs again from an input that is kept. Exact among schedules that hold
    what they keep until it is used (persistent ones).

    Args:
        stages: the layers.
        memory: whole units that may be held at once. The gradients that travel along are not counted.

    Raises:
        ValueError: there are no stages, or ``memory`` is negative.

    Example:
        >>> equal = [Stage(1.0, 2.0, 1, 2)] * 4
        >>> [chain_seconds(equal, memory) for memory in (8, 5, 4, 3, 2, 1)]
        [12.0, 14.0, 15.0, 18.0, inf, inf]
    """
    if not stages:
        raise ValueError("stages is empty; a chain has at least one layer")
    positive("memory", memory, zero=True)

    @cache
    def best(first: int, last: int, left: int) -> float:
        """Of the layers from first to last. The input of the first is held already and not among what is ``left``."""
        stage = stages[first]
        own = stage.kept - stage.given
        if own > left:
            return inf if first == last else _jump(first, last, left)
        if first == last:
            return stage.forward_s + stage.backward_s
        # all is kept of the first layer; its result is the next one's input
        rest = left - own - stages[first + 1].given
        whole = stage.forward_s + stage.backward_s + best(first + 1, last, rest) if rest >= 0 else inf
        return min(whole, _jump(first, last, left))

    def _jump(first: int, last: int, left: int) -> float:
        """Runs on without keeping anything to a layer whose input is then kept."""
        found, seconds = inf, 0.0
        for place in range(first + 1, last + 1):
            seconds += stages[place - 1].forward_s
            rest = left - stages[place].given
            if rest >= 0:
                found = min(found, seconds + best(place, last, rest) + best(first, place - 1, left))
        return found

    return best(0, len(stages) - 1, memory - stages[0].given) if memory >= stages[0].given else inf

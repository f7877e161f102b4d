"""Choices for which a backward pass holds few bytes at once, by changing how one group of values is had at a time.

The linear program of ``tq.systems.rematerialization`` counts the peak by blocks; ``tq.systems.backward_timeline``
counts it node by node, which no linear program of a bearable size does. So its choices are starts, from which this
goes downhill. What it ends at is a local optimum: no change of one group, or of two neighbours, is better.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

from tq.systems.backward_timeline import timeline
from tq.systems.rematerialization import Choice, Graph, settle

Group = tuple[int, ...]
Score = tuple[float, float]
_SWEEPS = 8  # over all groups, at most


def groups(graph: Graph, ties: Sequence[int] | None = None) -> list[Group]:
    """Values that are changed together: those at one place of all equal blocks, and those that are tied, or alone.

    Args:
        ties: as of ``cheapest``.
    """
    blocks: dict[int, list[int]] = {}
    tied: dict[tuple[int, int], list[int]] = {}
    for number, value in enumerate(graph.values):
        blocks.setdefault(value.block, []).append(number)
    for number, stands in enumerate(range(len(graph.operations)) if ties is None else ties):
        for place, made in enumerate(graph.made[number]):
            tied.setdefault((stands, place), []).append(made)
    usual = Counter(map(len, blocks.values())).most_common(1)
    equal = [block for block in blocks.values() if usual and len(block) == usual[0][0]]
    places = zip(*equal, strict=True) if len(equal) > 1 else ()
    found = dict.fromkeys([*places, *map(tuple, tied.values())])
    return [group for group in found if {len(graph.values[value].ways) for value in group} - {0}]


def lowered(graph: Graph, choice: Choice, among: Sequence[Group], *, pairs: bool = False) -> Choice:
    """The choice, changed as long as that lowers its peak, or with the same peak what is held on the way to it.

    Args:
        among: groups, of which one at a time is changed.
        pairs: also change neighbours in that order at once, where no group alone does any good: a few times as long.

    Raises:
        ValueError: as ``timeline``.
    """

    def score(found: Choice, best: Score) -> Score:
        held = timeline(graph, found, best[0])
        return max(held), sum(held)

    before, found = None, _downhill(graph, choice, [(group,) for group in among], score)
    while pairs and found != before:
        before = found
        found = _downhill(graph, found, [*pairwise(among), *((group,) for group in among)], score)
    return found


def quickened(graph: Graph, choice: Choice, among: Sequence[Group], limit: float) -> Choice:
    """The choice, changed as long as that saves time while its peak stays within a limit of bytes, or its own."""
    limit = max(limit, *timeline(graph, choice))

    def score(found: Choice, best: Score) -> Score:
        if found.seconds < best[1] and max(timeline(graph, found, limit)) > limit:
            return math.inf, math.inf
        return limit, found.seconds

    return _downhill(graph, choice, [(group,) for group in among], score)


def _downhill(
    graph: Graph, choice: Choice, moves: Sequence[tuple[Group, ...]], score: Callable[[Choice, Score], Score]
) -> Choice:
    best = score(choice, (math.inf, math.inf))
    for _ in range(_SWEEPS):
        before = best
        for move in moves:
            for other in _changed(graph, choice, move):
                if (found := score(other, best)) < best:
                    best, choice = found, other
        if best == before:
            break
    return choice


def _changed(graph: Graph, choice: Choice, move: tuple[Group, ...]) -> Iterator[Choice]:
    """The choice with each group of a move stored in every other way, and not stored."""
    rest = {value: way for value, way in choice.stored.items() if not any(value in group for group in move)}
    for ways in product(*((None, *range(min(len(graph.values[v].ways) for v in group))) for group in move)):
        if any(choice.stored.get(v) != way for group, way in zip(move, ways, strict=True) for v in group):
            changes = {v: way for group, way in zip(move, ways, strict=True) for v in group if way is not None}
            other = settle(graph, rest | changes)
            if other is not None:
                yield other

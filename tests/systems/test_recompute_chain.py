"""Golden numbers of revolve, and chains against a search through all schedules."""

from __future__ import annotations

import heapq
import random
from math import inf

import pytest

from tq.systems.recompute_chain import Stage, chain_seconds, extra_forwards, extra_forwards_formula, square_root

GOLDEN = {(10, 3): 15, (12, 2): 28, (12, 3): 21, (20, 5): 33, (24, 3): 61, (24, 4): 51, (35, 3): 105, (48, 4): 136,
          (96, 6): 264}  # fmt: skip


@pytest.mark.parametrize(("layers", "slots"), GOLDEN)
def test_revolve(layers: int, slots: int) -> None:
    assert extra_forwards(layers, slots) == extra_forwards_formula(layers, slots) == GOLDEN[layers, slots]


def test_formula_equals_the_program_everywhere() -> None:
    for layers in range(1, 40):
        for slots in range(1, 9):
            assert extra_forwards(layers, slots) == extra_forwards_formula(layers, slots)


def test_square_root() -> None:
    assert square_root(96).peak == pytest.approx(2 * 96**0.5, rel=0.03)
    for layers in (1, 2, 7, 30, 100):
        best = min(-(-layers // n) + n for n in range(1, layers + 1))
        assert square_root(layers).peak == best
    assert square_root(64, 1.0, 16.0).length < square_root(64, 16.0, 1.0).length


def searched(stages: list[Stage], memory: int) -> float:
    """Dijkstra over what is held: inputs, and all that a layer keeps. Any order, nothing assumed persistent."""
    last = len(stages)
    start = (frozenset({0}), frozenset(), 0, last)  # inputs, whole layers, where the forward pass stands, what is left
    heap, seen, ticket = [(0.0, 0, start)], set(), 1
    while heap:
        seconds, _, state = heapq.heappop(heap)
        if state in seen:
            continue
        seen.add(state)
        inputs, whole, at, left = state
        if not left:
            return seconds
        following = []
        if left - 1 in whole:
            rest = frozenset(n for n in inputs if n < left - 1), frozenset(n for n in whole if n < left - 1)
            following += [(stages[left - 1].backward_s, (*rest, n, left - 1)) for n in (*rest[0], -1)]
            following += [(stages[left - 1].backward_s, (inputs, rest[1], left - 1, left - 1))]
        following += [(0.0, (inputs - {n}, whole, at, left)) for n in inputs if n]
        following += [(0.0, (inputs, whole, n, left)) for n in inputs]
        if 0 <= at < left:
            run = stages[at].forward_s
            for keep_in in (inputs, inputs | {at + 1}) if at + 1 < left else (inputs,):
                following.append((run, (keep_in, whole, at + 1, left)))
                if at in inputs:
                    following.append((run, (keep_in, whole | {at}, at + 1, left)))
        for cost, new in following:
            held = sum(stages[n].given for n in new[0] if n < last)
            held += sum(stages[n].kept - stages[n].given for n in new[1])
            if held <= memory and all(n in new[0] for n in new[1]):
                heapq.heappush(heap, (seconds + cost, ticket, new))
                ticket += 1
    return inf


def test_equal_chains_need_no_more_than_the_search() -> None:
    for layers in (1, 2, 3, 4):
        stages = [Stage(1.0, 2.0, 1, 2)] * layers
        for memory in range(1, 2 * layers + 2):
            assert chain_seconds(stages, memory) == searched(stages, memory)


def test_different_chains_are_near_the_search() -> None:
    """Persistent schedules are not always the best; they are never better than the search."""
    r, equal, total = random.Random(0), 0, 0
    for _ in range(30):
        stages = [Stage(r.randint(1, 5), r.randint(1, 5), g := r.randint(1, 3), g + r.randint(1, 4)) for _ in range(3)]
        memory = r.randint(4, 14)
        ours, best = chain_seconds(stages, memory), searched(stages, memory)
        assert ours >= best
        equal, total = equal + (ours == best), total + 1
    assert equal >= 0.8 * total


def test_more_memory_is_never_slower() -> None:
    r = random.Random(1)
    stages = [Stage(r.random(), r.random(), g := r.randint(1, 4), g + r.randint(1, 9)) for _ in range(12)]
    seconds = [chain_seconds(stages, memory) for memory in range(5, 120, 5)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(sum(s.forward_s + s.backward_s for s in stages))


@pytest.mark.parametrize("call", (
    lambda: extra_forwards(0, 1), lambda: extra_forwards(3, 0), lambda: square_root(0), lambda: square_root(3, -1.0),
    lambda: chain_seconds([], 3), lambda: chain_seconds([Stage(1, 1, 1, 1)], -1),
))  # fmt: skip
def test_hostile(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]

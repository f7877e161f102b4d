"""The program against all choices tried, its laws, and the reference counts of a timeline."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems.backward_timeline import timeline
from tq.systems.rematerialization import (
    KEEP,
    Graph,
    Operation,
    Value,
    Way,
    cheapest,
    enumerated,
    is_local,
    least_bytes,
    peak_by_block,
    settle,
)


def random_graph(seed: int) -> Graph:
    """At most seven values in a few blocks, some with two made by one operation."""
    r = random.Random(seed)
    operations, values = [], []
    for number in range(r.randint(2, 6)):
        sources = tuple(r.sample(range(len(values)), min(len(values), r.randint(0, 2)))) if values else ()
        operations.append(Operation(None if r.random() < 0.15 else float(r.randint(1, 9)), sources))
        for _ in range(r.choice([1, 1, 1, 2])):
            nbytes = 8 * r.randint(1, 10)
            ways = [Way(KEEP, nbytes)]
            ways += [Way("4 bits", nbytes // 4, float(r.randint(1, 5)), True, r.random())] * (r.random() < 0.6)
            ways += [Way("disk", 0, float(r.randint(5, 12)))] * (r.random() < 0.3)
            fixed = r.random() < 0.1
            values.append(Value(nbytes, () if fixed else tuple(ways), r.random() < 0.7, number, number // 2,
                                r.random() < 0.3))  # fmt: skip
    return Graph(tuple(values[:7]), tuple(o for n, o in enumerate(operations) if n <= values[:7][-1].operation))


@pytest.mark.parametrize("limits", ("budget", "peak", "noise", "all"))
def test_the_program_equals_all_choices_tried(limits: str) -> None:
    solved = 0
    for seed in range(60):
        graph, r = random_graph(seed), random.Random(seed + 1000)
        budget = r.random() * graph.nbytes
        peak = budget * (1 + r.random()) if limits in ("peak", "all") else None
        noise = r.random() if limits in ("noise", "all") else None
        best = enumerated(graph, budget, peak=peak, noise=noise)
        if best is None:
            with pytest.raises(ValueError):
                cheapest(graph, budget, peak=peak, noise=noise, gap=0.0)
            continue
        found = cheapest(graph, budget, peak=peak, noise=noise, gap=0.0)
        assert found.seconds == pytest.approx(best.seconds, abs=1e-9)
        assert found.nbytes <= budget
        assert peak is None or peak_by_block(graph, found) <= peak and is_local(graph, found)
        assert noise is None or found.noise <= noise + 1e-9
        solved += 1
    assert solved > 20


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_more_bytes_never_cost_more_time(seed: int) -> None:
    graph = random_graph(seed)
    least = least_bytes(graph)
    if least is None:
        return
    budgets = [least + (graph.nbytes - least) * k / 4 for k in range(5)]
    seconds = [cheapest(graph, budget, gap=0.0).seconds for budget in budgets]
    assert all(less >= more - 1e-9 for less, more in zip(seconds, seconds[1:], strict=False))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_an_impossible_budget_says_the_least_possible_one(seed: int) -> None:
    graph = random_graph(seed)
    least = least_bytes(graph)
    if least:
        with pytest.raises(ValueError, match=f"{least:,}"):
            cheapest(graph, least - 1)
        assert cheapest(graph, least).nbytes == least


def chain(blocks: int) -> tuple[Graph, list[int]]:
    """Blocks of twelve operations on a residual stream, tied in groups of 1, 2, 4, ..."""
    operations, values, ties = [Operation(1e-3)], [Value(400, _ways(400), True, 0, -1)], [0]
    leader, left, size = 1, 0, 1
    for block in range(blocks):
        if not left:
            leader, left, size = len(operations), size, 2 * size
        start = len(operations)
        for k in range(12):
            source = start - 1 if k == 0 else len(values) - 1
            operations.append(Operation(1e-3 * (1 + 7 * (k % 4 == 3)), (source,)))
            values.append(Value(400 * (1 + 3 * (k % 3 == 0)), _ways(400 * (1 + 3 * (k % 3 == 0))), k % 5 != 1,
                                len(operations) - 1, block))  # fmt: skip
            ties.append(leader + k)
        left -= 1
    return Graph(tuple(values), tuple(operations)), ties


def _ways(nbytes: int) -> tuple[Way, ...]:
    return Way(KEEP, nbytes), Way("4 bits", nbytes // 4, 4e-4 * nbytes / 400, True), Way("disk", 0, 4e-3)


def test_ninety_six_layers_take_about_a_second() -> None:
    graph, ties = chain(96)
    start = time.process_time()
    costs = [cheapest(graph, share * graph.nbytes, ties=ties).seconds for share in (0.5, 0.3, 0.1)]
    assert time.process_time() - start < 3 * 3  # one second each, on a machine that others use
    assert costs == sorted(costs)


def test_ties_cost_little_and_never_gain() -> None:
    graph, ties = chain(7)
    for share in (0.6, 0.3, 0.1):
        free, tied = (cheapest(graph, share * graph.nbytes, ties=t, gap=0.0).seconds for t in (None, ties))
        assert free - 1e-9 <= tied <= 1.1 * free


def test_ties_between_different_operations_are_refused() -> None:
    graph = Graph((Value(8, _ways(8), True, 0), Value(8, (), True, 1)), (Operation(1.0), Operation(1.0, (0,))))
    with pytest.raises(ValueError, match="other ways"):
        cheapest(graph, 16, ties=[0, 0])


def test_a_strict_value_is_not_made_of_coded_ones() -> None:
    source = Value(400, _ways(400), True, 0)
    for strict in (False, True):
        graph = Graph((source, Value(400, (), True, 1, 0, strict)), (Operation(None), Operation(1.0, (0,))))
        assert (settle(graph, {0: 1}) is None) == strict
        assert settle(graph, {0: 0}) is not None


def test_what_nobody_needs_is_dropped() -> None:
    graph = Graph((Value(8, _ways(8), False, 0), Value(8, _ways(8), True, 1)), (Operation(1.0), Operation(1.0, (0,))))
    choice = settle(graph, {0: 0, 1: 0})
    assert choice is not None and choice.stored == {1: 0} and not choice.again and choice.nbytes == 8


def test_timeline_of_a_chain() -> None:
    """Four values of 10 bytes, the first stored: the second is made for the third and held until its own node."""
    values = tuple(Value(10, (Way(KEEP, 10),), True, n) for n in range(4))
    operations = tuple(Operation(1.0, (n - 1,) if n else ()) for n in range(4))
    graph = Graph(values, operations, ((0, 3), (1, 2), (2, 1), (3, 0)))
    choice = settle(graph, {0: 0, 3: 0})
    assert choice is not None and choice.again == {1, 2}
    assert timeline(graph, choice) == [20, 30, 20, 10]
    keep = settle(graph, dict.fromkeys(range(4), 0))
    assert keep is not None and timeline(graph, keep) == [40, 30, 20, 10]


@pytest.mark.parametrize("bad", (
    lambda: Graph((Value(1, (), True, 0),), (Operation(1.0, (0,)),)),
    lambda: Graph((Value(1, (Way("a", 1), Way("a", 2)), True, 0),), (Operation(1.0),)),
    lambda: Graph((Value(1, (), True, 3),), (Operation(1.0),)),
    lambda: timeline(Graph((Value(1, (), False, 0),), (Operation(1.0),)), settle(Graph((), ()), {})),
    lambda: cheapest(Graph((), ()), -1),
    lambda: cheapest(Graph((Value(1, (), True, 0),), (Operation(None),)), 10),
))  # fmt: skip
def test_hostile_graphs(bad: object) -> None:
    with pytest.raises(ValueError):
        bad()  # type: ignore[operator]


def test_time_that_is_up_is_not_taken_for_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import scipy.optimize

    monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: SimpleNamespace(x=None, status=1))
    with pytest.raises(TimeoutError, match="within 3 s"):
        cheapest(random_graph(0), 1000, time_limit_s=3.0)
    monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: SimpleNamespace(x=None, status=2))
    with pytest.raises(ValueError, match="no choice fits"):
        cheapest(random_graph(0), 1000)

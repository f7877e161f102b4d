"""Two processes that share one simulation: whether virtual processors tell the time of real ones.

Each holds half of the objects. Per window they swap one message over a pipe: the events that go to the other, and the
time of the earliest event that either knows of. The seconds that this takes are foretold from the counts of
``tq.systems.event_simulation.conservative`` and three costs that are measured apart: of an event, of a swap without
events, and of an event in a swap.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from heapq import heappop, heappush
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tq.systems.event_simulation import Event, Phold, Trace, conservative, sequential

PROCESSORS = 2
Half = tuple[list[Event], list[int], float]  # events in order, states of all objects (its own are right), seconds


def _swap(me: Connection, first: bool, message: Any) -> Any:
    """Sends and receives; one of the two begins, so that neither waits with a full pipe."""
    if first:
        me.send(message)
        return me.recv()
    got = me.recv()
    me.send(message)
    return got


def _half(me: Connection, number: int, model: Phold) -> Half:
    first, last = (model.objects * end // PROCESSORS for end in (number, number + 1))  # of its objects
    heap, handle = [event for event in model.first() if first <= event[2] < last], model.handle
    states, found = [0] * model.objects, list[Event]()
    _swap(me, not number, None)  # both are there
    began, away = time.perf_counter(), list[Event]()
    while True:
        mine = min(heap[0][0] if heap else math.inf, min(away)[0] if away else math.inf)
        arrived, other = _swap(me, not number, (away, mine))
        for event in arrived:
            heappush(heap, event)
        earliest = min(mine, other)
        if earliest == math.inf:
            return found, states, time.perf_counter() - began
        safe, away = earliest + model.lookahead, []
        while heap and heap[0][0] < safe:
            event = heappop(heap)
            at = event[2]
            states[at], sent = handle(states[at], event)
            found.append(event)
            if sent is None:
                continue
            if first <= sent[2] < last:
                heappush(heap, sent)
            else:
                away.append(sent)


def _swaps(me: Connection, number: int, times: int, events: int) -> float:
    """Seconds of a swap with so many events each way; median of ten batches."""
    message = ([(0.5 + i, i << 40, i) for i in range(events)], 0.5)
    batches = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(times):
            _swap(me, not number, message)
        batches.append((time.perf_counter() - began) / times)
    return statistics.median(batches)


def _child(me: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    me.send(work(me, 1, *arguments))


def _two(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returns in this process and in another one."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_child, args=(there, work, arguments), daemon=True)
    process.start()
    there.close()
    try:
        return [work(here, 0, *arguments), here.recv()]
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


def on_two(model: Phold) -> tuple[Trace, float]:
    """(what two processes commit, seconds without those of starting them).

    Raises:
        ValueError: for a model without look-ahead.

    Example:
        >>> model = Phold(16, 4, end=5.0)
        >>> on_two(model)[0].digest == sequential(model).digest
        True
    """
    if not model.lookahead:
        raise ValueError("lookahead must be positive: without it no two events are safe at once")
    halves = _two(_half, model)
    middle = model.objects // PROCESSORS
    times, keys, objects = zip(*sorted(halves[0][0] + halves[1][0]), strict=True)
    committed = np.array(times, np.float64), np.array(keys, np.uint64), np.array(objects, np.int64)
    states = (*halves[0][1][:middle], *halves[1][1][middle:])
    return Trace(committed, states, PROCESSORS), max(half[2] for half in halves)


def check(task: dict[str, Any], device: str = "cpu") -> dict[str, float]:
    """Two processes beside one, and beside what the virtual processors foretell.

    Args:
        task: model (fields of ``Phold``) and repeats.
        device: "cpu".

    Returns:
        equal: whether all commit the same events. one, two: median seconds. foretold: seconds of two. speedup: one over
        two. over: two over foretold.
    """
    model = Phold(**task["model"])
    virtual = conservative(model, PROCESSORS)
    one, two, equal = [], [], True
    for _ in range(task["repeats"]):
        began = time.perf_counter()
        plain = sequential(model)
        one.append(time.perf_counter() - began)
        trace, seconds = on_two(model)
        two.append(seconds)
        equal &= trace.digest == plain.digest == virtual.digest
    empty, full = (max(_two(_swaps, 200, events)) for events in (0, 100))
    # a swap carries the events of both ways, each packed and unpacked by one after the other
    foretold = (
        virtual.rounds * statistics.median(one) / virtual.events + virtual.barriers * empty
        + virtual.messages * (full - empty) / 200
    )  # fmt: skip
    measured = statistics.median(two)
    return {
        "equal": float(equal), "one": statistics.median(one), "two": measured, "foretold": foretold,
        "speedup": statistics.median(one) / measured, "over": measured / foretold,
    }  # fmt: skip

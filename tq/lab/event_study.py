"""Simulated events on virtual processors: do engines agree, what do they waste, and from when on do more hurt?

All functions take a task of JSON values, with the fields of ``tq.systems.event_simulation.Phold`` in ``model``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tq.systems.event_simulation import Phold, Trace, conservative, horizon, optimistic, sequential
from tq.systems.synchronisation import Scaling

WINDOW = 4.0  # of optimism, in mean delays, where it is held back
COMMIT, COMMIT_HELD = 32, 8  # rounds of Time Warp from one global virtual time to the next


def agree(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Whether three engines commit the same events in the same order, with the seconds that each took here."""
    model, processors = Phold(**task["model"]), task["processors"]
    engines: dict[str, Callable[[], Trace]] = {
        "sequential": lambda: sequential(model), "conservative": lambda: conservative(model, processors),
        "optimistic": lambda: optimistic(model, processors, commit_every=COMMIT),
    }  # fmt: skip
    digests, seconds, events = [], {}, 0
    for name, engine in engines.items():
        began = time.perf_counter()
        found = engine()
        digests.append(found.digest)
        seconds[name], events = time.perf_counter() - began, found.events
    return {"equal": len(set(digests)) == 1, "events": events, "seconds": seconds}


def wasted(task: dict[str, Any], device: str = "cpu") -> dict[str, float]:
    """Committed events per processor and round of both parallel engines, with a barrier of ``task["barrier"]`` events.

    Returns:
        conservative, optimistic and held: efficiencies, the last of Time Warp that is held back to ``WINDOW``.
        barriers: share of the conservative machine's time. messages: between processors, per event. undone: share of
        the events that Time Warp took and undid.
    """
    model, processors, barrier = Phold(**task["model"]), task["processors"], task["barrier"]
    safe, free = conservative(model, processors), optimistic(model, processors, commit_every=COMMIT)
    held = optimistic(model, processors, WINDOW, COMMIT_HELD)
    return {
        "conservative": safe.efficiency(barrier), "optimistic": free.efficiency(barrier),
        "held": held.efficiency(barrier), "undone": 1 - free.kept, "undone-held": 1 - held.kept,
        "messages": safe.messages / safe.events,
        "barriers": barrier * safe.barriers / (safe.rounds + barrier * safe.barriers),
    }  # fmt: skip


def scaling(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Times of the conservative machine by its processors, in events, with a barrier of a per processor (``per_rank``)
    or b per doubling (``per_doubling``).

    Returns:
        processors, linear and tree: times. best_linear, best_tree: processors of the least. n_star: sqrt(W / a).
    """
    model, counts = Phold(**task["model"]), task["processors"]
    found = [conservative(model, n) for n in counts]
    laws = {"linear": Scaling(1.0, task["per_rank"]), "tree": Scaling(1.0, 0.0, task["per_doubling"])}
    times = {
        name: [each.rounds + each.barriers * (law.seconds(n) - 1.0 / n) for n, each in zip(counts, found, strict=True)]
        for name, law in laws.items()
    }
    best = {f"best_{name}": counts[line.index(min(line))] for name, line in times.items()}
    whole = Scaling(float(found[0].events), task["per_rank"] * found[0].barriers)
    return {"processors": counts, "n_star": whole.best, **times, **best}


def ring(task: dict[str, Any], device: str = "cpu") -> dict[str, float]:
    """Share of a ring's processors that go on, and the spread of their local times; ``task`` as of ``horizon``."""
    found = horizon(**task)
    return {"utilisation": found.utilisation, "width": found.width}

"""The measurements of `tq.lab.fabric_study` as tasks of a chapter: plain arguments in, plain numbers out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tq.lab import fabric_study


def measure(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``fabric_study.<task["what"]>`` with the other fields as arguments, and the task beside what it returns.

    device: always the CPU's network. One task at a time: they share the machine's processors.
    """
    arguments = {name: value for name, value in task.items() if name != "what"}
    functions: dict[str, Callable[..., dict[str, Any]]] = {
        "collective": fabric_study.collective, "collisions": fabric_study.collisions, "failure": fabric_study.failure,
        "rounds": fabric_study.rounds, "sizes": fabric_study.sizes, "queue": fabric_study.queue,
    }  # fmt: skip
    return {"task": task, **functions[task["what"]](**arguments)}


def plan(full: bool, seed: int) -> list[dict[str, Any]]:
    """What a chapter measures: about 15 minutes in full, under half a minute else."""
    nbytes, repeats = (4_000_000, 3) if full else (400_000, 1)
    tasks: list[dict[str, Any]] = []
    for ratio in (1.0, 2.0, 4.0) if full else (4.0,):
        for pattern in fabric_study.PATTERNS if full else ("ring, packed", "ring, interleaved"):
            for turn in range(2 if full else 1):
                tasks.append({
                    "what": "collective", "pattern": pattern, "ratio": ratio, "nbytes": nbytes, "repeats": repeats,
                    "seed": seed + turn,
                })  # fmt: skip
    for turn in range(12 if full else 2):
        tasks.append({"what": "collisions", "seed": seed + turn, "nbytes": nbytes})
    for resilient in (False, True):
        for turn in range(4 if full else 1):
            tasks.append({"what": "failure", "resilient": resilient, "seed": seed + turn})
    delay = {"what": "rounds", "delay_ms": 5.0, "repeats": 15 if full else 3}
    for name in ("ring", "doubling", "tree"):
        for ranks in (2, 4, 8) if full else (4,):
            tasks.append(delay | {"name": name, "ranks": ranks})
    factors = [0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0]
    for ranks in (4, 8) if full else ():
        tasks.append({"what": "sizes", "ranks": ranks, "delay_ms": 5.0, "factors": factors, "repeats": 9})
    for load in (0.5, 0.8, 0.9) if full else (0.8,):
        for turn in range(2 if full else 1):
            packets = 8_000 if full else 500
            tasks.append({"what": "queue", "load": load, "packets": packets, "seed": seed + turn})
    return tasks

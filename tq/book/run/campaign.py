"""Runs that take hours each, done one by one on whatever machine there is, and committed as small files.

    data/campaign/<name>.json     a finished run: its task, losses, commit, sources, versions, machine and time
    _build/campaign/<name>.*      a run under way, which goes on where it was

A chapter that reads them depends on these files, and names what each was made with. They are not made again when the
code changes: the commit tells what they were made by.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from tq.book import paths
from tq.book.record.dependencies import module_hash
from tq.book.record.provenance import commit, device_name, versions
from tq.book.run.stamps import lock, now
from tq.lab.training_step import SHAPES, Setting, fitting_autocast
from tq.train.experiments import gpt2_scale, watched_runs

DIGITS = 5  # of a loss in nats


def folder() -> Path:
    return paths.root() / "data" / "campaign"


def finished() -> dict[str, dict[str, Any]]:
    """{name: what is committed of the run}, in the order of their names."""
    return {path.stem: paths.read_json(path) or {} for path in sorted(folder().glob("*.json"))}


def plan(autocast: str = "") -> dict[str, dict[str, Any]]:
    """All runs by name, in the order of their worth: their tasks, of ``watched_runs.train`` where they have a "look",
    else of ``gpt2_scale.train``."""
    return watched_runs.long_runs() | gpt2_scale.on_a_cpu(autocast)


def _tasks() -> dict[str, dict[str, Any]]:
    """In bfloat16 where this machine multiplies that faster."""
    fast = fitting_autocast(Setting(SHAPES["25m"], 4))
    return plan("" if fast is None else "bfloat16")


def listed() -> str:
    """A line a run: finished, where and when; under way; or to be done."""
    done, lines = finished(), []
    for name in plan():
        if name in done:
            said = f"{done[name]['ended']}  {done[name]['device_name']}  {done[name]['hours']:.1f} h"
        else:
            said = "under way" if _checkpoint(name).exists() else "to be done"
        lines.append(f"{name:24} {said}")
    return "\n".join(lines)


def _checkpoint(name: str) -> Path:
    return paths.build() / "campaign" / f"{name}.ckpt"


def run(name: str | None = None) -> Path:
    """Does one run, the next that is missing if none is named; returns its file. ValueError where there is none.

    Several may run at a time, of different names.
    """
    known = _tasks()
    missing = [each for each in known if each not in finished()]
    if name is not None and name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}; got {name!r}")
    if name is None and not missing:
        raise ValueError("all runs of the campaign are finished")
    chosen = missing[0] if name is None else name
    task, started, start = known[chosen], now(), time.perf_counter()
    module = watched_runs if "look" in task else gpt2_scale
    with lock(f"campaign-{chosen}.lock"):
        if module is watched_runs:
            outcome, hours = watched_runs.train(task), (time.perf_counter() - start) / 3600
        else:
            outcome = gpt2_scale.train(task, checkpoint=_checkpoint(chosen), progress=True)
            hours = outcome["step_s"] * len(outcome["losses"]) / 3600
            outcome["losses"] = outcome["losses"].tolist()
    said = {
        "task": task, "commit": commit()[0], "sources": module_hash(module.__name__, "cpu"), "versions": versions(),
        "device_name": device_name("cpu"), "started": started, "ended": now(), "hours": hours,
    }  # fmt: skip
    path = folder() / f"{chosen}.json"
    text = json.dumps(said | {"outcome": _plain(outcome)}, separators=(",", ": "))
    paths.write_bytes(path, text.encode() + b"\n")
    return path


def _plain(value: Any) -> Any:
    """Numbers as JSON has them, losses to ``DIGITS``; None for what is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else None
    return value

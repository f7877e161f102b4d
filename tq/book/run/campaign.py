"""Runs that take hours each, done one by one on whatever machine there is, and committed as small files.

    data/campaign/<name>.json     a finished run: its task, losses, commit, sources, versions, machine and time
    _build/campaign/<name>.*      a run under way, which goes on where it was

A chapter that reads them depends on these files, and names what each was made with. They are not made again when the
code changes: the commit tells what they were made by.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tq.book import paths
from tq.book.record.dependencies import module_hash
from tq.book.record.provenance import commit, device_name, versions
from tq.book.run.stamps import lock, now
from tq.lab.training_step import SHAPES, Setting, fitting_autocast
from tq.train.experiments import gpt2_scale

DIGITS = 5  # of a loss in nats


def folder() -> Path:
    return paths.root() / "data" / "campaign"


def finished() -> dict[str, dict[str, Any]]:
    """{name: what is committed of the run}, in the order of their names."""
    return {path.stem: paths.read_json(path) or {} for path in sorted(folder().glob("*.json"))}


def tasks() -> dict[str, dict[str, Any]]:
    """Of ``gpt2_scale.on_a_cpu``, in bfloat16 where this machine multiplies that faster."""
    fast = fitting_autocast(Setting(SHAPES["25m"], 4))
    return gpt2_scale.on_a_cpu("" if fast is None else "bfloat16")


def listed() -> str:
    """A line a run: finished, where and when; under way; or to be done."""
    done, lines = finished(), []
    for name in gpt2_scale.on_a_cpu(""):
        if name in done:
            said = f"{done[name]['ended']}  {done[name]['device_name']}  {done[name]['hours']:.1f} h"
        else:
            said = "under way" if _checkpoint(name).exists() else "to be done"
        lines.append(f"{name:24} {said}")
    return "\n".join(lines)


def _checkpoint(name: str) -> Path:
    return paths.build() / "campaign" / f"{name}.ckpt"


def run(name: str | None = None) -> Path:
    """Does one run, the next that is missing if none is named; returns its file. ValueError where there is none."""
    known = tasks()
    missing = [each for each in known if each not in finished()]
    if name is not None and name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}; got {name!r}")
    if name is None and not missing:
        raise ValueError("all runs of the campaign are finished")
    chosen = missing[0] if name is None else name
    started = now()
    with lock("campaign.lock"):
        outcome = gpt2_scale.train(known[chosen], checkpoint=_checkpoint(chosen), progress=True)
    said = {
        "task": known[chosen], "commit": commit()[0], "sources": module_hash(gpt2_scale.__name__, "cpu"),
        "versions": versions(), "device_name": device_name("cpu"), "started": started, "ended": now(),
        "hours": outcome["step_s"] * len(outcome["losses"]) / 3600,
    }  # fmt: skip
    plain = {key: value for key, value in outcome.items() if key != "losses"}
    plain["valid"] = None if math.isnan(outcome["valid"]) else outcome["valid"]
    plain["bits_per_byte"] = None if math.isnan(outcome["valid"]) else outcome["bits_per_byte"]
    losses = [round(loss, DIGITS) for loss in outcome["losses"].tolist()]
    text = json.dumps(said | {"outcome": plain, "losses": losses}, indent=None, separators=(",", ": "))
    path = folder() / f"{chosen}.json"
    paths.write_bytes(path, text.encode() + b"\n")
    return path

"""How often a cluster fails: failures of its GPUs are independent and strike at a constant rate, so their rates add up.

The rate is that of Llama 3's 54 days (`data/reliability.csv`), of everything that interrupted the run, counted a GPU.
Not modelled: infant mortality, failures that come together (a switch, a power feed), slow nodes that never stop.

Source: Llama Team 2024 (arXiv:2407.21783), table 5.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tq.systems import tables
from tq.systems.arguments import Real, positive
from tq.systems.hardware import CHECKED

COLUMNS = ("quantity", "value", "unit", "source", "date", "checked", "note")
DAY_S = 86_400.0


@cache
def _table() -> dict[str, float]:
    path = tables.folder() / "reliability.csv"
    found: dict[str, float] = {}
    for line, row in enumerate(tables.read(path, COLUMNS), start=2):
        if row["checked"] not in CHECKED or not row["source"] or not row["date"]:
            raise ValueError(f"{path.name}, row {line}: source, date and one of {', '.join(CHECKED)} are needed")
        if row["quantity"] in found:
            raise ValueError(f"{path.name}, row {line}: {row['quantity']} stands there twice")
        found[row["quantity"]] = tables.number(path, line, "value", row["value"])
    return found


def gpu_hours_per_interruption() -> float:
    """GPU-hours between two interruptions, as Llama 3 saw them."""
    found = _table().get("gpu_hours_per_interruption")
    if found is None:
        raise ValueError("reliability.csv has no gpu_hours_per_interruption")
    return found


def mtbf_s(gpus: Real, gpu_hours_per_failure: Real | None = None) -> Real:
    """Mean seconds between failures of so many GPUs. gpu_hours_per_failure: None, what Llama 3 saw."""
    positive("gpus", gpus)
    hours = gpu_hours_per_interruption() if gpu_hours_per_failure is None else gpu_hours_per_failure
    positive("gpu_hours_per_failure", hours)
    return hours * 3600 / gpus


def failures_in(seconds: Real, gpus: Real, gpu_hours_per_failure: Real | None = None) -> Real:
    """Expected failures in so many seconds."""
    positive("seconds", seconds, zero=True)
    return seconds / mtbf_s(gpus, gpu_hours_per_failure)


def survival(seconds: Real, gpus: Real, gpu_hours_per_failure: Real | None = None) -> Real:
    """Chance that nothing fails for so many seconds, exp(-t / M)."""
    return np.exp(-failures_in(seconds, gpus, gpu_hours_per_failure))


def goodput(lost_share: Real) -> Real:
    """Share of the time that trains, 1 - lost; 0 where more is lost than there is."""
    positive("lost_share", lost_share, zero=True)
    return np.maximum(1 - lost_share, 0.0)

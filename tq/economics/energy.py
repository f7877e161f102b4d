"""Electricity and carbon of a run: `data/power.csv`, `energy_factors.csv`, `carbon.csv`, `metered_energy.csv`.

What a GPU takes at the plug is the rated power of its share of the node, times the load of a node in training, times
1 + the network's share, times the PUE. Only metered totals can check this: a published number that *is* hours times
TDP (BLOOM's 433 MWh) repeats its own assumption, and is refused here.
No embodied carbon, no water, no hourly grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tq.economics.intervals import Interval
from tq.systems import tables
from tq.systems.arguments import positive


@dataclass(frozen=True)
class Power:
    """Rated power of a node of a GPU. node_max_w: None where no source was found."""

    gpu: str
    node_gpus: int
    node_max_w: float | None
    node_measured_w: float | None
    source: str
    checked: str

    @property
    def rated_w(self) -> float:
        """Watts of one GPU with its share of the node, as rated; ValueError without a rating of the node."""
        if self.node_max_w is None:
            raise ValueError(f"gpu={self.gpu!r}: data/power.csv has no rating of its node, so its power is not known")
        return self.node_max_w / self.node_gpus


@dataclass(frozen=True)
class Metered:
    """A published total. basis: metered | assumed (of a measured chip, an assumed run) | tdp (hours times TDP)."""

    id: str
    model: str
    gpu: str
    gpu_hours: float | None
    watt_per_gpu: float | None
    pue: float
    mwh: float
    basis: str
    source: str
    checked: str


@cache
def factors() -> dict[str, Interval]:
    """load, network_share and pue with their ranges."""
    path = tables.folder() / "energy_factors.csv"
    columns = ("factor", "low", "mid", "high", "unit", "date", "source", "checked", "note")
    return {
        row["factor"]: Interval(*(tables.number(path, line, column, row[column]) for column in columns[1:4]))
        for line, row in enumerate(tables.read(path, columns), start=2)
    }


def _number(path: Path, line: int, column: str, text: str) -> float | None:
    return tables.number(path, line, column, text) if text else None


@cache
def powers() -> dict[str, Power]:
    path = tables.folder() / "power.csv"
    columns = ("gpu", "node_gpus", "node_max_w", "node_measured_w", "source", "checked", "note")
    found = {}
    for line, row in enumerate(tables.read(path, columns), start=2):
        node, most, measured = (_number(path, line, column, row[column]) for column in columns[1:4])
        assert node is not None, f"{path.name}, row {line}: node_gpus is needed"
        found[row["gpu"]] = Power(row["gpu"], int(node), most, measured, row["source"], row["checked"])
    return found


def power(gpu: str) -> Power:
    """Rated power of a GPU; ValueError for an unknown one."""
    if gpu not in powers():
        raise ValueError(f"gpu={gpu!r}: its power is not in data/power.csv; accepted are {', '.join(powers())}")
    return powers()[gpu]


@cache
def regions() -> dict[str, float]:
    """kg CO2e a kWh by region; their years stand in the file."""
    path = tables.folder() / "carbon.csv"
    columns = ("region", "kg_per_kwh", "year", "source", "checked", "note")
    rows = enumerate(tables.read(path, columns), start=2)
    return {row["region"]: tables.number(path, line, "kg_per_kwh", row["kg_per_kwh"]) for line, row in rows}


def carbon_kg(kwh: float, region: str) -> float:
    """Carbon of so many kWh on a grid's yearly mean; ValueError for an unknown region."""
    positive("kwh", kwh, zero=True)
    if region not in regions():
        raise ValueError(f"region={region!r}: accepted are {', '.join(regions())}")
    return kwh * regions()[region]


def gpu_w(gpu: str, load: float, network_share: float = 0.0, pue: float = 1.0) -> float:
    """Watts that one GPU costs at the plug: rated power of its share of the node, times load, network and PUE."""
    positive("load", load, most=1.0)
    positive("network_share", network_share, zero=True)
    positive("pue", pue)
    if pue < 1:
        raise ValueError(f"pue must be at least 1, got {pue}")
    return power(gpu).rated_w * load * (1 + network_share) * pue


def energy_kwh(gpu_hours: float, gpu: str, load: float, network_share: float = 0.0, pue: float = 1.0) -> float:
    """Electricity of so many GPU-hours."""
    positive("gpu_hours", gpu_hours, zero=True)
    return gpu_hours * gpu_w(gpu, load, network_share, pue) / 1000


def gpu_interval_w(gpu: str) -> Interval:
    """Watts a GPU at the plug, all three factors at their low, middle and high together: wider than likely."""
    load, network, pue = (factors()[name] for name in ("load", "network_share", "pue"))
    low, mid, high = (
        gpu_w(gpu, getattr(load, e), getattr(network, e), getattr(pue, e)) for e in ("low", "mid", "high")
    )
    return Interval(low, mid, high)


@cache
def published() -> tuple[Metered, ...]:
    """Every published total that is known here, metered or not."""
    path = tables.folder() / "metered_energy.csv"
    columns = "id,model,gpu,gpus,days,watt_per_gpu,pue,mwh,basis,source,checked,note".split(",")
    found = []
    for line, row in enumerate(tables.read(path, columns), start=2):
        gpus, days, watt, pue, mwh = (_number(path, line, column, row[column]) for column in columns[3:8])
        assert pue is not None and mwh is not None, f"{path.name}, row {line}: pue and mwh are needed"
        hours = gpus * days * 24 if gpus is not None and days is not None else None
        found.append(
            Metered(
                row["id"], row["model"], row["gpu"], hours, watt, pue, mwh, row["basis"], row["source"], row["checked"]
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Check:
    """A metered total beside what is computed for it. `of`: what the computation took from the source."""

    id: str
    metered_mwh: float
    computed_mwh: float
    of: str

    @property
    def error(self) -> float:
        return self.computed_mwh / self.metered_mwh - 1


def check_metered(id: str, computed_mwh: float | None = None) -> Check:
    """A computed energy against a metered one. computed_mwh None: measured watts times GPU-hours times PUE, which
    checks the bookkeeping alone. A total that was not metered raises: it would validate nothing."""
    known = {total.id: total for total in published()}
    metered = [total.id for total in known.values() if total.basis == "metered"]
    if id not in known:
        raise ValueError(f"id={id!r}: no such total; metered ones are {', '.join(metered)}")
    total = known[id]
    if total.basis != "metered":
        raise ValueError(
            f"id={id!r} was not metered (its basis is {total.basis!r}); metered ones are {', '.join(metered)}"
        )
    if computed_mwh is None:
        if total.gpu_hours is None or total.watt_per_gpu is None:
            raise ValueError(f"id={id!r}: its source gives no GPU-hours and power; pass computed_mwh")
        computed_mwh = total.gpu_hours * total.watt_per_gpu * total.pue / 1e6
        return Check(id, total.mwh, computed_mwh, "power of a chip, hours and PUE")
    if not (math.isfinite(computed_mwh) and computed_mwh > 0):
        raise ValueError(f"computed_mwh must be a positive number, got {computed_mwh}")
    return Check(id, total.mwh, computed_mwh, "nothing")

"""GPUs, nodes and network tiers: `data/hardware.csv`, and the cluster that a run is predicted on. No prices, no CPUs.

Rates of the table are as their sources print them: peak dense bf16, NVLink in both directions together, networks in
Gbit/s of one direction. Here they become FLOP/s and bytes/s of one direction.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

from tq.systems import tables
from tq.systems.arguments import Real, one_of, positive, positive_int

COLUMNS = ("kind", "name", "quantity", "value", "unit", "source", "date", "checked", "note")
CHECKED = ("read in source", "transcribed, not re-read", "not found", "assumed")
UNITS = {
    "gpu": {
        "peak_bf16": "TFLOP/s", "memory": "GiB", "hbm": "GB/s", "nvlink": "GB/s", "tdp": "W", "year": "year",
        "node_gpus": "GPUs", "nic": "Gbit/s",
    },
    "link": {"rate": "Gbit/s", "latency": "s"},
}  # fmt: skip
TERA, GIGA, GIB = 1e12, 1e9, 2.0**30
NVLINK_LATENCY_S = 3e-6  # a round of a collective within a node; an assumption


@dataclass(frozen=True)
class Gpu:
    """peak_flops: dense bf16. nvlink_bytes_per_s, nic_bytes_per_s: one direction, of one GPU."""

    name: str
    peak_flops: float
    memory_bytes: float
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float
    node_gpus: int
    tdp_w: float
    year: int


@dataclass(frozen=True)
class Tier:
    """A network tier: rate of one port in one direction, and what a round of a collective takes at least."""

    name: str
    bytes_per_s: float
    latency_s: float


def gbit(rate: Real) -> Real:
    """Bytes/s of a rate in Gbit/s."""
    return rate * GIGA / 8


@functools.cache
def _table() -> dict[str, dict[str, dict[str, float]]]:
    path = tables.folder() / "hardware.csv"
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in UNITS}
    for line, row in enumerate(tables.read(path, COLUMNS), start=2):
        where = f"{path.name}, row {line}"
        one_of(f"{where}: kind", row["kind"], list(UNITS))
        units = UNITS[row["kind"]]
        one_of(f"{where}: quantity", row["quantity"], list(units))
        one_of(f"{where}: unit of {row['quantity']}", row["unit"], [units[row["quantity"]]])
        one_of(f"{where}: checked", row["checked"], CHECKED)
        if not row["source"] or not row["date"]:
            raise ValueError(f"{where}: source and date must not be empty")
        entry = found[row["kind"]].setdefault(row["name"], {})
        if row["quantity"] in entry:
            raise ValueError(f"{where}: {row['name']} has its {row['quantity']} twice")
        entry[row["quantity"]] = tables.number(path, line, "value", row["value"])
        positive(f"{where}: value", entry[row["quantity"]])
    for kind, units in UNITS.items():
        for name, entry in found[kind].items():
            if set(entry) != set(units):
                raise ValueError(f"{path.name}: {name} lacks {', '.join(sorted(set(units) - set(entry)))}")
    return found


def gpus() -> tuple[str, ...]:
    """Names of the known GPUs."""
    return tuple(_table()["gpu"])


def tiers() -> tuple[str, ...]:
    """Names of the known network tiers."""
    return tuple(_table()["link"])


@functools.cache
def gpu(name: str) -> Gpu:
    """A GPU by its name in `data/hardware.csv`; ValueError lists the names."""
    one_of("gpu", name, gpus())
    row = _table()["gpu"][name]
    return Gpu(
        name, row["peak_bf16"] * TERA, row["memory"] * GIB, row["hbm"] * GIGA, row["nvlink"] * GIGA / 2,
        gbit(row["nic"]), int(row["node_gpus"]), row["tdp"], int(row["year"]),
    )  # fmt: skip


@functools.cache
def tier(name: str) -> Tier:
    """A network tier by its name in `data/hardware.csv`; ValueError lists the names."""
    one_of("tier", name, tiers())
    row = _table()["link"][name]
    return Tier(name, gbit(row["rate"]), row["latency"])


@dataclass(frozen=True)
class Cluster:
    """GPUs of one type in nodes, on a network of two levels.

    Fields that are None (default) take their values from ``data/hardware.csv``, where each has its source. Rates may
    be arrays of samples.

    Attributes:
        gpu: name of the GPU; "a100-80gb" by default. ``tq.systems.hardware.gpus()`` lists the names.
        gpus: number of GPUs; 1 by default.
        network: name of the network tier between nodes, such as "eth-100g" or "ib-ndr"; None (default) means the
            port that each GPU has in a usual node. ``tq.systems.hardware.tiers()`` lists the names.
        node_gpus: GPUs per node.
        inter_bytes_per_s: bytes per second between nodes, of one GPU in one direction; may be inf.
        intra_bytes_per_s: bytes per second within a node, of one GPU in one direction; may be inf.
        peak_flops: FLOP/s of one GPU in dense bf16.
        hbm_bytes_per_s: bytes per second of one GPU's memory.
        latency_s: seconds per round of a collective between nodes, at least.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a name is unknown or a number is not positive.

    Example:
        >>> from tq.systems import Cluster
        >>> cluster = Cluster("h100-80gb", gpus=64, network="eth-100g")
        >>> cluster.node_gpus, cluster.inter_bytes_per_s / 1e9  # GB/s
        (8, 12.5)
    """

    gpu: str = "a100-80gb"
    gpus: int = 1
    network: str | None = None
    node_gpus: Any = None
    inter_bytes_per_s: Real = None
    intra_bytes_per_s: Real = None
    peak_flops: Real = None
    hbm_bytes_per_s: Real = None
    latency_s: Real = None

    def __post_init__(self) -> None:
        one_of("gpu", self.gpu, gpus())
        if self.network is not None:
            one_of("network", self.network, tiers())
        spec = gpu(self.gpu)
        positive_int("gpus", self.gpus)
        port = None if self.network is None else tier(self.network)
        defaults = {
            "node_gpus": spec.node_gpus,
            "inter_bytes_per_s": port.bytes_per_s if port else spec.nic_bytes_per_s,
            "intra_bytes_per_s": spec.nvlink_bytes_per_s,
            "peak_flops": spec.peak_flops,
            "hbm_bytes_per_s": spec.hbm_bytes_per_s,
            "latency_s": port.latency_s if port else tier("ib-hdr").latency_s,
        }
        for field in fields(self):
            if field.name in defaults:
                if getattr(self, field.name) is None:
                    object.__setattr__(self, field.name, defaults[field.name])
                if field.name == "node_gpus":
                    positive_int("node_gpus", self.node_gpus)
                else:
                    positive(field.name, getattr(self, field.name), zero=field.name == "latency_s")

    @property
    def spec(self) -> Gpu:
        """The GPU as ``data/hardware.csv`` has it."""
        return gpu(self.gpu)

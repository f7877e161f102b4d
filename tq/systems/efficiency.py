"""Which share of a machine's rates is reached: two fitted constants a GPU type, two a software generation.

`data/software.csv` holds what is known of a generation (fused attention, width of gradients), `data/efficiency.csv`
what `python -m tq.systems.calibration` fitted to published runs. Nothing is fitted at import.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from tq.systems import tables
from tq.systems.arguments import Real, one_of, positive
from tq.systems.hardware import gpu as known_gpu
from tq.systems.memory import Software

FACTS = (
    "software", "flash", "gradient_bytes", "loss_bytes", "dtensor", "hidden_is_free", "stops_early", "source",
    "checked",
)  # fmt: skip
YES_OR_NO = ("flash", "dtensor", "hidden_is_free", "stops_early")
FITTED = ("kind", "name", "constant", "value", "rows", "basis")
CONSTANTS = {
    "gpu": ("gemm", "hbm"), "software": ("compute", "communication"), "pair": ("rows",), "interval": ("low", "high"),
}  # fmt: skip
SAME_CHIP = {
    "a100-40gb": "a100-80gb", "h800-80gb": "h100-80gb", "h200-141gb": "h100-80gb", "gh200-96gb": "h100-80gb",
}  # fmt: skip
INTRA, INTER = 0.77, 0.85  # of the nominal NVLink and network rate that large collectives reach; assumptions


@dataclass(frozen=True)
class Efficiency:
    """Shares of a machine's nominal rates that a training run reaches. Each is a number or an array of samples.

    Attributes:
        gemm: share of the GPU's peak FLOP/s that large matrix products reach; 0.75 by default.
        hbm: share of the GPU's memory bandwidth that large kernels reach; 0.8 by default.
        compute: time of the software's kernels, relative to those shares; 1 by default.
        communication: time that a step waits for collectives, relative to their time at the links' rates: below 1
            where it is overlapped, above 1 where it is slower; 1 by default.
        intra: share of the nominal rate within a node that collectives reach; 0.77 by default, an assumption.
        inter: share of the nominal rate between nodes that collectives reach; 0.85 by default, an assumption.
        low: low end of the 80 % interval of measured over predicted time; 0.9 by default.
        high: high end of that interval; 1.1 by default.

    Raises:
        TypeError: if a field is no number and no array of numbers.
        ValueError: if a share is not between 0 and 1, or ``low`` is above ``high``.

    Example:
        >>> from tq.systems import Cluster, Efficiency, Layout, Transformer, predict
        >>> run = Transformer.preset("gpt2-124m"), Layout(), Cluster("a100-80gb", 1)
        >>> half, whole = (predict(*run, efficiency=Efficiency(gemm=share)).parts["gemm"] for share in (0.5, 1.0))
        >>> 1 < half / whole <= 2
        True
    """

    gemm: Real = 0.75
    hbm: Real = 0.8
    compute: Real = 1.0
    communication: Real = 1.0
    intra: Real = INTRA
    inter: Real = INTER
    low: Real = 0.9
    high: Real = 1.1

    def __post_init__(self) -> None:
        for field in fields(self):
            most = 1.0 if field.name in ("gemm", "hbm", "intra", "inter") else float("inf")
            positive(field.name, getattr(self, field.name), zero=field.name == "communication", most=most, finite=True)
        if not np.all(np.asarray(self.low) <= np.asarray(self.high)):
            raise ValueError(f"low must be at most high, got low={self.low} and high={self.high}")


@dataclass(frozen=True)
class Facts:
    """memory: what memory depends on. hidden_is_free: ZeRO-3 traffic that hides takes nothing from the computation.
    stops_early: full recomputation ends with the last tensor that the backward pass needs."""

    memory: Software
    hidden_is_free: bool
    stops_early: bool = False

    @property
    def flash(self) -> bool:
        """Attention is fused."""
        return self.memory["flash"]

    @property
    def gradient_bytes(self) -> float:
        """Width of gradients as they are added up and sent."""
        return self.memory["gradient_bytes"]


@functools.cache
def _software() -> dict[str, Facts]:
    path = tables.folder() / "software.csv"
    found = {}
    for line, row in enumerate(tables.read(path, FACTS), start=2):
        for column in YES_OR_NO:
            one_of(f"{path.name}, row {line}: {column}", row[column], ("yes", "no"))
        width, loss = (tables.number(path, line, name, row[name]) for name in ("gradient_bytes", "loss_bytes"))
        flash, dtensor, free, early = (row[name] == "yes" for name in YES_OR_NO)
        held = Software(gradient_bytes=width, flash=flash, loss_bytes=loss, dtensor=dtensor)
        found[row["software"]] = Facts(held, free, early)
    return found


def generations() -> tuple[str, ...]:
    """Names of the known software generations."""
    return tuple(_software())


def software_facts(software: str) -> Facts:
    one_of("software", software, generations())
    return _software()[software]


@functools.cache
def constants() -> dict[tuple[str, str], dict[str, float]]:
    """{(kind, name): {constant: value}} of `data/efficiency.csv`."""
    path = tables.folder() / "efficiency.csv"
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line, row in enumerate(tables.read(path, FITTED), start=2):
        one_of(f"{path.name}, row {line}: kind", row["kind"], list(CONSTANTS))
        one_of(f"{path.name}, row {line}: constant", row["constant"], CONSTANTS[row["kind"]])
        value = tables.number(path, line, "value", row["value"])
        found.setdefault((row["kind"], row["name"]), {})[row["constant"]] = value
    return found


@functools.cache
def efficiency(gpu: str, software: str) -> Efficiency:
    """The constants of a GPU type under a software generation. Where no published run has the two together, the
    software's kernels are taken to be no faster than those of most such runs on that chip, and the interval is wider;
    where none has the chip it is at least as wide. ValueError where either is unknown."""
    known_gpu(gpu)
    software_facts(software)
    table = constants()
    known = ("gpu", gpu) in table
    like = ("gpu", gpu) if known else ("gpu", "other")
    together = ("pair", f"{gpu} {software}") in table
    interval = table["interval", "fitted pairs" if together else "other pairs" if known else "other GPUs"]
    software_constants = dict(table["software", software])
    if not together:
        chip = SAME_CHIP.get(gpu, gpu) if known else ""
        software_constants["compute"] = max(software_constants["compute"], _usual_compute(chip))
    return Efficiency(**table[like], **software_constants, **interval)


@functools.cache
def _usual_compute(chip: str) -> float:
    """Median of compute over the fit rows of a chip; of all rows where the chip is ""."""
    table, found = constants(), []
    for (kind, name), entry in table.items():
        gpu, _, software = name.partition(" ")
        if kind == "pair" and chip in ("", gpu):
            found += [table["software", software]["compute"]] * int(entry["rows"])
    return float(median(found))

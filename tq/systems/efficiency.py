"""Which share of a machine's rates is reached: two fitted constants a GPU type, two a software generation.

`data/software.csv` holds what is known of a generation (fused attention, width of gradients), `data/efficiency.csv`
what `python -m tq.systems.fit` fitted to published runs. Nothing is fitted at import.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from tq.systems import tables
from tq.systems.checks import Real, one_of, positive
from tq.systems.hardware import gpu as known_gpu

FACTS = ("software", "flash", "gradient_bytes", "source", "checked")
FITTED = ("kind", "name", "constant", "value", "rows", "basis")
CONSTANTS = {"gpu": ("gemm", "hbm"), "software": ("compute", "communication"), "interval": ("low", "high")}
INTRA, INTER = 0.77, 0.85  # of the nominal NVLink and network rate that large collectives reach; assumptions


@dataclass(frozen=True)
class Efficiency:
    """gemm, hbm: shares of the GPU's peak and of its memory bandwidth that large kernels reach. compute: time of the
    software's kernels, relative. communication: what a step waits for, relative to collectives at the links' rates:
    below 1 where it is hidden, above 1 where it is slower. intra, inter: shares of the links' nominal rates. low, high:
    80 % interval of measured over predicted time. Each a number or an array of samples."""

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
            positive(field.name, getattr(self, field.name), zero=field.name == "communication", most=most)


@dataclass(frozen=True)
class Facts:
    """flash: attention is fused. gradient_bytes: width of gradients as they are added up and sent."""

    flash: bool
    gradient_bytes: float


@functools.cache
def _software() -> dict[str, Facts]:
    path = tables.folder() / "software.csv"
    found = {}
    for line, row in enumerate(tables.read(path, FACTS), start=2):
        one_of(f"{path.name}, row {line}: flash", row["flash"], ("yes", "no"))
        width = tables.number(path, line, "gradient_bytes", row["gradient_bytes"])
        found[row["software"]] = Facts(row["flash"] == "yes", width)
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
    """The constants of a GPU type under a software generation. ValueError where either is unknown."""
    known_gpu(gpu)
    software_facts(software)
    table = constants()
    like = ("gpu", gpu) if ("gpu", gpu) in table else ("gpu", "other")
    interval = table["interval", "fitted GPUs" if gpu in _fitted_gpus() else "other GPUs"]
    return Efficiency(**table[like], **table["software", software], **interval)


@functools.cache
def _fitted_gpus() -> frozenset[str]:
    rows = tables.read(tables.folder() / "efficiency.csv", FITTED)
    return frozenset(row["name"] for row in rows if row["kind"] == "gpu" and row["basis"] == "fitted")

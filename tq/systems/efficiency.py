"""Which share of a machine's rates is reached: two fitted constants a GPU type, two a software generation.

`data/software.csv` holds what is known of a generation (fused attention, width of gradients), `data/efficiency.csv`
what was fitted to published runs by `python -m tq.systems.fit`. Nothing here is fitted at import.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from tq.systems import tables
from tq.systems.checks import Real, one_of, positive

FACTS = ("software", "flash", "gradient_bytes", "source", "checked")
INTRA, INTER = 0.77, 0.85  # of the nominal NVLink and network rate that large collectives reach; assumptions


@dataclass(frozen=True)
class Efficiency:
    """gemm, hbm: shares of the GPU's peak and memory bandwidth. compute: what the software's kernels take, relative.
    exposed: share of communication that it does not hide. intra, inter: shares of the links' rates. low, high: 80 %
    interval of measured over predicted time. Each a number or an array of samples."""

    gemm: Real = 0.75
    hbm: Real = 0.8
    compute: Real = 1.0
    exposed: Real = 1.0
    intra: Real = INTRA
    inter: Real = INTER
    low: float = 0.9
    high: float = 1.1

    def __post_init__(self) -> None:
        for field in fields(self):
            most = 1.0 if field.name in ("gemm", "hbm", "exposed", "intra", "inter") else float("inf")
            positive(field.name, getattr(self, field.name), zero=field.name == "exposed", most=most)


@dataclass(frozen=True)
class Facts:
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


def efficiency(gpu: str, software: str) -> Efficiency:
    """The fitted constants of a GPU type under a software generation."""
    return Efficiency()

"""What it costs to keep a part of the training state in a slower place: bytes a parameter, seconds a step, long steps.

Where nothing hides, a step grows by the time that the moved bytes take. Per parameter both that time and the
computation, 6 FLOPs a token, are fixed, so the slowdown depends on the tokens of a step and not on the model. A
streamed update hides the shorter of moving and updating behind the longer, but for its first and last bucket.

Sources: ZeRO-Offload (Ren et al. 2021), ZeRO-Infinity (Rajbhandari et al. 2021); rates in `data/stores.csv`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tq.systems import tables
from tq.systems.arguments import Real, boolean, instance, one_of, positive, positive_int
from tq.systems.hardware import CHECKED, GIGA

COLUMNS = ("name", "quantity", "value", "unit", "source", "date", "checked", "note")
UNITS = {"read": "GB/s", "write": "GB/s", "duplex": "1"}
FLOPS = 6.0  # a parameter and token, forward and backward


@dataclass(frozen=True)
class Place:
    """read, write: bytes/s to the device and away from it. duplex: both at the same time, at full rate.

    both: bytes/s each way while both go at once, where that was measured; it counts in the place of ``duplex``.
    beside: moving goes on beside computing; False where the cores that compute also copy, as in a CPU's own memory.
    """

    name: str
    read_bytes_per_s: Real
    write_bytes_per_s: Real
    duplex: bool
    both_bytes_per_s: Real | None = None
    beside: bool = True

    def __post_init__(self) -> None:
        for field in ("read_bytes_per_s", "write_bytes_per_s"):
            positive(field, getattr(self, field), finite=True)
        if self.both_bytes_per_s is not None:
            positive("both_bytes_per_s", self.both_bytes_per_s, finite=True)
        for name in ("duplex", "beside"):
            boolean(name, getattr(self, name))

    def seconds(self, read_bytes: Real, written_bytes: Real) -> Real:
        """Time to move so many bytes in and out."""
        positive("read_bytes", read_bytes, zero=True, finite=True)
        positive("written_bytes", written_bytes, zero=True, finite=True)
        shared = 0.0 if self.both_bytes_per_s is None else np.minimum(read_bytes, written_bytes)
        there, back = (read_bytes - shared) / self.read_bytes_per_s, (written_bytes - shared) / self.write_bytes_per_s
        alone = np.maximum(there, back) if self.duplex else there + back
        return alone if self.both_bytes_per_s is None else alone + shared / self.both_bytes_per_s


@dataclass(frozen=True)
class Plan:
    """Bytes a parameter: on the device all the time, away between uses, read and written in a step. host: that the
    host's memory moves for an update which is computed there."""

    device: float
    away: float
    read: float
    written: float
    host: float = 0.0

    def __post_init__(self) -> None:
        for field in ("device", "away", "read", "written", "host"):
            positive(field, getattr(self, field), zero=True, finite=True)


def streamed(state_bytes: float) -> Plan:
    """Both moments away, in so many bytes a parameter; bf16 weights and gradients and fp32 weights on the device."""
    positive("state_bytes", state_bytes, finite=True)
    return Plan(8.0, state_bytes, state_bytes, state_bytes)


#: 16 bytes a parameter: bf16 weights and gradients, fp32 weights and both moments.
PLANS = {
    "all on the device": Plan(16.0, 0.0, 0.0, 0.0),
    # gradients leave, weights come back; the update there reads w, g, m, v and writes w, m, v and w in bf16
    "ZeRO-Offload": Plan(2.0, 14.0, 2.0, 2.0, 28.0),
    "ZeRO-Infinity": Plan(0.0, 16.0, 16.0, 14.0),  # weights for both passes and all states in, gradients and states out
    "moments streamed, fp32": streamed(8.0),
}


@functools.cache
def _table() -> dict[str, dict[str, float]]:
    path = tables.folder() / "stores.csv"
    found: dict[str, dict[str, float]] = {}
    for line, row in enumerate(tables.read(path, COLUMNS), start=2):
        where = f"{path.name}, row {line}"
        one_of(f"{where}: quantity", row["quantity"], list(UNITS))
        one_of(f"{where}: unit of {row['quantity']}", row["unit"], [UNITS[row["quantity"]]])
        one_of(f"{where}: checked", row["checked"], CHECKED)
        if not row["source"] or not row["date"]:
            raise ValueError(f"{where}: source and date must not be empty")
        entry = found.setdefault(row["name"], {})
        if row["quantity"] in entry:
            raise ValueError(f"{where}: {row['name']} has its {row['quantity']} twice")
        entry[row["quantity"]] = tables.number(path, line, "value", row["value"])
    for name, entry in found.items():
        if set(entry) != set(UNITS):
            raise ValueError(f"{path.name}: {name} lacks {', '.join(sorted(set(UNITS) - set(entry)))}")
    return found


def places() -> tuple[str, ...]:
    """Names of the places of `data/stores.csv`."""
    return tuple(_table())


def place(name: str) -> Place:
    """A place by its name; ValueError lists the names."""
    one_of("place", name, places())
    row = _table()[name]
    return Place(name, row["read"] * GIGA, row["write"] * GIGA, row["duplex"] == 1)


def moving_s(numbers: Real, plan: Plan, place: Place, host_bytes_per_s: Real = np.inf) -> Real:
    """Seconds a step that the traffic of so many parameters takes, and an update on the host if there is one."""
    instance("plan", plan, Plan)
    instance("place", place, Place)
    positive("numbers", numbers)
    positive("host_bytes_per_s", host_bytes_per_s)
    return place.seconds(numbers * plan.read, numbers * plan.written) + numbers * plan.host / host_bytes_per_s


def update_s(numbers: Real, plan: Plan, place: Place, compute_s: Real, buckets: int) -> Real:
    """Seconds of an update whose state passes through the device in equal buckets.

    compute_s: that of the same update with the state in place. The first bucket comes and the last one goes alone.
    """
    positive("compute_s", compute_s, zero=True, finite=True)
    positive_int("buckets", buckets)
    positive("numbers", numbers)
    bucket = numbers / buckets
    ends = place.seconds(bucket * plan.read, 0.0) + place.seconds(0.0, bucket * plan.written)
    inner = place.seconds((numbers - bucket) * plan.read, (numbers - bucket) * plan.written)
    return (np.maximum(inner, compute_s) if place.beside else inner + compute_s) + ends


def slowdown(
    tokens: Real, plan: Plan, place: Place, flops_per_s: Real, host_bytes_per_s: Real = np.inf
) -> Real:  # fmt: skip
    """By what share of its computation a step of so many tokens grows if nothing hides; the model's size cancels."""
    positive("tokens", tokens)
    positive("flops_per_s", flops_per_s, finite=True)
    return moving_s(1.0, plan, place, host_bytes_per_s) / (FLOPS * tokens / flops_per_s)


def tokens_for(
    share: Real, plan: Plan, place: Place, flops_per_s: Real, host_bytes_per_s: Real = np.inf
) -> Real:  # fmt: skip
    """Tokens a step at which it grows by no more than this share."""
    positive("share", share, finite=True)
    return slowdown(1.0, plan, place, flops_per_s, host_bytes_per_s) / share

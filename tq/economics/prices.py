"""Dated prices of GPUs and storage: `data/prices.csv`, `data/storage_prices.csv`. Nothing is fetched, none is guessed.

A price belongs to the day on which its source was read. A question that only old prices can answer is answered, with
the warning `StalePrices`; `max_age_days` accepts them without. To refresh: write a snapshot with the same columns,
check it with ``python -m tq.economics prices --check FILE``, take it in with ``--import FILE``. Old rows stay: the file
is a history.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np

from tq.economics.intervals import Interval
from tq.systems import tables

KINDS = ("on-demand", "spot", "reserved")
CHECKED = ("read in source", "transcribed, not re-read", "not found")
MAX_AGE_DAYS = 180
HOURS_PER_MONTH = 730.0


class StalePrices(UserWarning):
    """Every price that answers is older than accepted."""


@dataclass(frozen=True)
class Price:
    """One price: USD an hour and GPU on `date`. network_gbit_per_gpu: of the offer, None where its source is silent."""

    provider: str
    gpu: str
    kind: str
    usd_per_gpu_hour: float
    date: datetime.date
    network_gbit_per_gpu: float | None
    source: str
    checked: str
    note: str = ""

    def age_days(self, as_of: datetime.date) -> int:
        return (as_of - self.date).days


@dataclass(frozen=True)
class StoragePrice:
    """USD a gigabyte (1e9 bytes) and month."""

    provider: str
    kind: str
    usd_per_gb_month: float
    date: datetime.date
    source: str
    checked: str
    note: str = ""


COLUMNS = tuple(field.name for field in fields(Price))
STORAGE_COLUMNS = tuple(field.name for field in fields(StoragePrice))


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"date must be a day such as 2026-11-09, got {text!r}") from None


def _usd(column: str, text: str, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and (value >= 0 if zero else value > 0)):
        raise ValueError(f"{column} must be a {'' if zero else 'positive '}number, got {text!r}")
    return value


def _row(row: dict[str, str]) -> Price:
    """One row of the file; ValueError names the column."""
    for column in ("provider", "gpu", "source"):
        if not row[column].strip():
            raise ValueError(f"{column} must not be empty")
    if row["gpu"] != row["gpu"].lower() or " " in row["gpu"]:
        raise ValueError(f"gpu must be a lower-case name such as h100-80gb, got {row['gpu']!r}")
    if row["kind"] not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {row['kind']!r}")
    if row["checked"] not in CHECKED:
        raise ValueError(f"checked must be one of {'; '.join(CHECKED)}; got {row['checked']!r}")
    network = row["network_gbit_per_gpu"]
    return Price(
        row["provider"], row["gpu"], row["kind"], _usd("usd_per_gpu_hour", row["usd_per_gpu_hour"]), _day(row["date"]),
        _usd("network_gbit_per_gpu", network) if network else None, row["source"], row["checked"], row["note"],
    )  # fmt: skip


def check(path: Path | str) -> list[str]:
    """Everything that is wrong with a file of prices, a line each; an empty list: it may be taken in."""
    path = Path(path)
    try:
        rows = tables.read(path, COLUMNS)
    except (OSError, ValueError) as error:
        return [_reason(path, error)]
    problems: list[str] = []
    seen: dict[tuple[object, ...], int] = {}
    for line, row in enumerate(rows, start=2):
        try:
            price = _row(row)
        except ValueError as error:
            problems.append(f"{path.name}, row {line}: {error}")
            continue
        key = (price.provider, price.gpu, price.kind, price.date)
        if key in seen:
            problems.append(f"{path.name}, row {line}: repeats row {seen[key]} (provider, gpu, kind and date)")
        seen.setdefault(key, line)
    return problems if rows else [f"{path.name}: holds no price"]


def _reason(path: Path, error: OSError | ValueError) -> str:
    return f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)


@dataclass(frozen=True)
class PriceBook:
    """Prices of one file. `path`: where they stand, for messages."""

    prices: tuple[Price, ...]
    path: Path

    @property
    def newest(self) -> datetime.date:
        return max(price.date for price in self.prices)

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(sorted({price.gpu for price in self.prices}))

    def latest(self, as_of: datetime.date | None = None) -> list[Price]:
        """The newest price of each provider, GPU and kind that was known on `as_of` (None: today)."""
        as_of = as_of or datetime.date.today()
        newest: dict[tuple[str, str, str], Price] = {}
        for price in self.prices:
            key = (price.provider, price.gpu, price.kind)
            if price.date <= as_of and (key not in newest or newest[key].date < price.date):
                newest[key] = price
        return list(newest.values())

    def find(
        self, gpu: str, kind: str = "on-demand", provider: str | None = None, *,
        as_of: datetime.date | None = None, max_age_days: int = MAX_AGE_DAYS,
    ) -> list[Price]:  # fmt: skip
        """Prices of a GPU, cheapest first, none older than `max_age_days` on the day `as_of` (None: today). Where all
        are older, all of them, and a warning `StalePrices`. ValueError: an unknown GPU, kind or provider, or none such.
        """
        if gpu not in self.gpus:
            raise ValueError(f"gpu={gpu!r}: {self.path.name} has no price of it; accepted are {', '.join(self.gpus)}")
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: accepted are {', '.join(KINDS)}")
        if max_age_days < 0:
            raise ValueError(f"max_age_days must be 0 or more, got {max_age_days}")
        providers = sorted({price.provider for price in self.prices})
        if provider is not None and provider not in providers:
            raise ValueError(f"provider={provider!r}: accepted are {', '.join(providers)}")
        as_of = as_of or datetime.date.today()
        rows = [p for p in self.latest(as_of) if p.gpu == gpu and p.kind == kind and provider in (None, p.provider)]
        what = f"{kind} prices of {gpu}" + (f" at {provider}" if provider else "")
        if not rows:
            raise ValueError(f"{self.path.name} has no {what} on or before {as_of}")
        fresh = [price for price in rows if price.age_days(as_of) <= max_age_days]
        if not fresh:
            warn_of_age(what, max(price.date for price in rows), as_of, max_age_days)
        return sorted(fresh or rows, key=lambda price: price.usd_per_gpu_hour)

    def spread(
        self, gpu: str, kind: str = "on-demand", *, as_of: datetime.date | None = None, max_age_days: int = MAX_AGE_DAYS
    ) -> Interval:
        """USD an hour and GPU over the providers: lowest, median, highest."""
        return spread(self.find(gpu, kind, as_of=as_of, max_age_days=max_age_days))


def warn_of_age(what: str, newest: datetime.date, as_of: datetime.date, max_age_days: int) -> None:
    """The warning `StalePrices`, with the way out."""
    warnings.warn(
        f"{what} are stale: the newest is of {newest}, {(as_of - newest).days} days before {as_of}, above "
        f"{max_age_days}. Import a newer snapshot (python -m tq.economics prices --import FILE) or accept older ones "
        "(--max-age-days)",
        StalePrices,
        stacklevel=3,
    )


def days(found: Iterable[Price | StoragePrice]) -> tuple[datetime.date, datetime.date]:
    """The days of some prices, at least one: (oldest, newest)."""
    dates = [price.date for price in found]
    return min(dates), max(dates)


def spread(found: Sequence[Price]) -> Interval:
    """USD an hour and GPU over some prices, at least one: lowest, median, highest."""
    usd = [price.usd_per_gpu_hour for price in found]
    return Interval(min(usd), float(np.median(usd)), max(usd))


def load(path: Path | str | None = None) -> PriceBook:
    """The prices of a file, `data/prices.csv` by default. ValueError with the first thing that is wrong with it."""
    path = tables.folder() / "prices.csv" if path is None else Path(path)
    problems = check(path)
    if problems:
        more = f" (and {len(problems) - 1} more: python -m tq.economics prices --check {path})" * (len(problems) > 1)
        raise ValueError(problems[0] + more)
    return PriceBook(tuple(_row(row) for row in tables.read(path, COLUMNS)), path)


def _text(prices: Iterable[Price]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for price in prices:
        cells = ["" if cell is None else f"{cell:.10g}" if isinstance(cell, float) else cell for cell in astuple(price)]
        writer.writerow(cells)
    return out.getvalue()


def take_in(snapshot: Path | str, into: Path | str | None = None) -> int:
    """Adds the rows of a snapshot to a file of prices and returns how many were new. A row for the same provider, GPU,
    kind and day is replaced. Nothing is written where either file has a fault (ValueError)."""
    target = tables.folder() / "prices.csv" if into is None else Path(into)
    old, new = load(target), load(snapshot)
    merged = {(p.provider, p.gpu, p.kind, p.date): p for p in old.prices}
    before = set(merged.values())
    merged |= {(p.provider, p.gpu, p.kind, p.date): p for p in new.prices}
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.write_text(_text(merged.values()), encoding="utf-8")
    os.replace(part, target)  # in one step: a kill leaves the old file or the new one
    return len(set(merged.values()) - before)


def storage(path: Path | str | None = None) -> list[StoragePrice]:
    """Prices of storage, cheapest first."""
    path = tables.folder() / "storage_prices.csv" if path is None else Path(path)
    found = []
    for line, row in enumerate(tables.read(path, STORAGE_COLUMNS), start=2):
        try:
            usd = _usd("usd_per_gb_month", row["usd_per_gb_month"])
            if row["checked"] not in CHECKED:
                raise ValueError(f"checked must be one of {'; '.join(CHECKED)}; got {row['checked']!r}")
            day = _day(row["date"])
        except ValueError as error:
            raise ValueError(f"{path.name}, row {line}: {error}") from None
        found.append(StoragePrice(row["provider"], row["kind"], usd, day, row["source"], row["checked"], row["note"]))
    return sorted(found, key=lambda price: price.usd_per_gb_month)

"""What the commands found: a record each, whose fields are what `--json` prints and from which alone the text is made.

A record's text may round and leave out, but it says nothing that its fields do not hold.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tq.economics.calculator import Result
from tq.economics.intervals import Interval
from tq.economics.prices import Price, StoragePrice, days
from tq.economics.run_cost import CompressionSaving, RunCost

GIB = 2.0**30


class Report(Protocol):
    """What every command returns."""

    def facts(self) -> dict[str, Any]:
        """What `--json` prints."""

    def lines(self) -> list[str]:
        """The text."""


def plain(value: Any) -> Any:
    """A record and what it holds as dictionaries, lists, text and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime.date) else value


@dataclass(frozen=True)
class Dates:
    """Of the prices that a report rests on."""

    oldest: datetime.date
    newest: datetime.date

    @classmethod
    def of(cls, found: Sequence[Price | StoragePrice]) -> Dates:
        return cls(*days(found))

    def __str__(self) -> str:
        return f"{self.newest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


def _range(interval: Interval, form: str = ",.0f", unit: str = "") -> str:
    if interval.low == interval.high:
        return f"{interval.mid:{form}}{unit}"
    return f"{interval.mid:{form}}{unit} ({interval.low:{form}} to {interval.high:{form}})"


@dataclass(frozen=True)
class Savings:
    """case: the calculator's inputs; result: its outputs."""

    case: dict[str, float]
    result: Result

    @property
    def pays(self) -> str:
        return {1.0: "yes", 0.0: "uncertain", -1.0: "no"}[self.result["pays"] or 0.0]

    def facts(self) -> dict[str, Any]:
        return {"case": self.case, **self.result, "pays": self.pays}

    def lines(self) -> list[str]:
        link, speed = self.result["breakeven_gbit"], self.result["breakeven_codec_g"]
        n = {name: value if value is not None else 0.0 for name, value in self.result.items()}
        return [
            f"step time        {n['plain_s']:.3f} s without, {n['coded_s']:.3f} s with compression of "
            f"{n['ratio']:.2f}x",
            f"gradient sync    {n['exchange_s']:.3f} s, with codec {n['coded_exchange_s']:.3f} s and "
            f"{n['codec_s']:.3f} s of codec",
            f"not overlapped   {n['share']:.1%} of the step without compression",
            f"saving           {n['saving']:.1%} (80 % of draws: {n['saving_low']:.1%} to {n['saving_high']:.1%})",
            f"run without      {n['plain_hours']:,.0f} h, ${n['plain_usd']:,.2f}",
            f"run with         {n['coded_hours']:,.0f} h, ${n['coded_usd']:,.2f}",
            f"saved            ${n['saved_usd']:,.2f} (${n['saved_usd_low']:,.0f} to ${n['saved_usd_high']:,.0f})",
            "break-even link  " + ("none: it pays on any link" if link is None else f"{link:,.0f} Gbit/s per GPU"),
            "break-even codec "
            + ("none: it pays at no speed" if speed is None else f"{speed:,.3g} billion elements/s"),
            f"does it pay      {self.pays}: {n['chance']:.0%} of draws save time",
        ]


@dataclass(frozen=True)
class Checkpoints:
    """Of a cluster that saves: ``bytes`` and ``write_s`` of one checkpoint; ``interval_s`` of work between two, as
    asked or the best; shares of the time; USD of all GPUs in a month of 30 days. stalled: by writing alone."""

    parameters: float
    gpus: int
    bytes: float
    write_s: float
    mtbf_s: float
    restart_s: float
    lives_shape: float
    interval_s: float
    waste: float
    stalled: float
    best_interval_s: float
    best_waste: float
    usd_per_gpu_hour: Interval
    prices: Dates | None

    @property
    def month_usd(self) -> float:
        return 720 * self.gpus * self.usd_per_gpu_hour.mid

    @property
    def month_bytes(self) -> float:
        return self.bytes * (1 - self.waste) * 720 * 3600 / self.interval_s

    def facts(self) -> dict[str, Any]:
        more = {"month_usd": self.month_usd, "wasted_usd": self.month_usd * self.waste, "month_bytes": self.month_bytes}
        return {**plain(self), **more, "best_wasted_usd": self.month_usd * self.best_waste}

    def lines(self) -> list[str]:
        def wasted(share: float) -> str:
            return f"{share:.2%} of the time, ${self.month_usd * share:,.0f} per month"

        own = [
            f"your interval   {self.interval_s / 60:,.1f} min of work: {wasted(self.waste)}",
            f"                {self.stalled:.2%} of the time for writing alone",
        ]
        return [
            f"checkpoint      {self.bytes / 1e9:,.0f} GB, written in {self.write_s:,.1f} s",
            f"failures        one every {self.mtbf_s / 3600:,.2f} h on {self.gpus:,} GPUs, {self.restart_s:,.0f} s to "
            "restart",
            f"best interval   {self.best_interval_s / 60:,.1f} min of work: {wasted(self.best_waste)}",
            *(own if self.interval_s != self.best_interval_s else []),
            f"written         {self.month_bytes / 1e12:,.1f} TB per month",
        ]


@dataclass(frozen=True)
class MemoryCase:
    largest_micro_batch: int
    fits: bool
    weights_gib: float
    gradients_gib: float
    states_gib: float
    activations_gib: float
    working_gib: float
    total_gib: float


@dataclass(frozen=True)
class MemoryByPart:
    gpu: str
    gpu_gib: float
    parameters: int
    software: str
    cases: dict[str, MemoryCase]

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self)
        return found | {name.replace(" ", "_"): case for name, case in found.pop("cases").items()}

    def lines(self) -> list[str]:
        size = f"{self.parameters / 1e9:.2f}B parameters on {self.gpu} with {self.gpu_gib:.4g} GiB, {self.software}"
        found = [size]
        for name, case in self.cases.items():
            parts = {key.removesuffix("_gib"): value for key, value in plain(case).items() if key.endswith("_gib")}
            found.append(f"{name}: " + ", ".join(f"{part} {value:.2f}" for part, value in parts.items()) + " GiB")
            fits = "fits" if case.fits else "does not fit"
            found.append(f"  {fits}; largest micro-batch: {case.largest_micro_batch} sequences")
        return found


@dataclass(frozen=True)
class Fit:
    """gpus: of the run. gpus_needed: the least doubling on which some layout fits, where the run's own does not."""

    fits: bool
    usable_gib: float
    gpu_gib: float
    gpus: int
    batch: int
    gpus_needed: int | None = None

    def warning(self, need_gib: float) -> str:
        """In words; "" where it fits."""
        if self.fits:
            return ""
        text = f"DOES NOT FIT: {need_gib:.1f} GiB are needed, {self.usable_gib:.1f} of {self.gpu_gib:.4g} can be used; "
        if self.gpus_needed is None:
            return text + f"nor does a batch of {self.batch} on 64 times as many GPUs"
        if self.gpus_needed == self.gpus:
            return text + f"another layout of the {self.gpus} GPUs fits"
        return text + f"{self.gpus_needed} GPUs have one that fits"


COST_INTERVALS = ("iteration_s", "hours", "gpu_hours", "usd", "kwh", "carbon_kg", "published_gpu_hours")


@dataclass(frozen=True)
class CostCase:
    run: RunCost
    fit: Fit

    @property
    def memory_gib(self) -> float:
        return float(self.run.prediction.memory_gib)

    def facts(self) -> dict[str, Any]:
        fit = {name: getattr(self.fit, name) for name in ("fits", "usable_gib", "gpus_needed")}
        found = {name: plain(getattr(self.run, name)) for name in (*COST_INTERVALS, "waste")}
        return found | {"memory_gib": self.memory_gib} | fit | {"tornado_usd": plain(self.run.tornado)}

    def lines(self, region: str) -> list[str]:
        run, warning = self.run, self.fit.warning(self.memory_gib)
        found = [f"  {warning}"] if warning else []
        found += [
            f"  iteration    {_range(run.iteration_s, '.3f', ' s')}, {self.memory_gib:.1f} GiB a GPU",
            f"  wall time    {_range(run.hours * (1 / 24), ',.1f', ' days')}, {_range(run.gpu_hours)} GPU-hours",
            f"  cost         ${_range(run.usd)}",
            f"  electricity  {_range(run.kwh * 1e-3, ',.1f', ' MWh')}",
            f"  carbon       {_range(run.carbon_kg * 1e-3, ',.1f', ' t CO2e')} in {region}",
        ]
        if run.waste:
            every = run.waste.interval_s / 60
            found.append(f"  failures     {run.waste.share:.1%} lost, a checkpoint every {every:.0f} min")
        return found


@dataclass(frozen=True)
class Cost:
    """price_dates: None where a price was given. saving: None without compression."""

    parameters: int
    tokens: float
    gpus: int
    gpu: str
    usd_per_gpu_hour: Interval
    price_dates: Dates | None
    network_gbit_per_gpu: float
    region: str
    level: float
    cases: dict[str, CostCase]
    saving: CompressionSaving | None = None

    def facts(self) -> dict[str, Any]:
        names = ("gpus", "usd_per_gpu_hour", "price_dates", "network_gbit_per_gpu", "level")
        found = {name: plain(getattr(self, name)) for name in names}
        found |= {name.replace(" ", "_"): case.facts() for name, case in self.cases.items()}
        if self.saving is not None:
            found["saving"] = plain(self.saving.saving) | {"chance": self.saving.chance}
        return found

    def lines(self) -> list[str]:
        dated = "at a given price" if self.price_dates is None else f"prices of {self.price_dates}"
        found = [
            f"{self.parameters / 1e9:.2f}B parameters, {self.tokens:.3g} tokens, {self.gpus} {self.gpu} on "
            f"{self.network_gbit_per_gpu:g} Gbit/s a GPU, {dated}"
        ]
        for name, case in self.cases.items():
            found += [f"{name}:", *case.lines(self.region)]
        whole = next(iter(self.cases.values())).run.published_gpu_hours
        found.append(f"published whole runs lead to expect {_range(whole)} GPU-hours")
        if self.saving is not None:
            saved = self.saving
            found.append(f"saving: {_range(saved.saving, '.1%')}, positive in {saved.chance:.0%} of the samples")
        return [*found, "ranges: 80 % intervals; prices: lowest, median and highest provider unless one is named"]


@dataclass(frozen=True)
class BreakevenRow:
    """saving: by overhead."""

    share: float
    link_gbit: float
    share_there: float
    breakeven_overhead: float
    saving: dict[str, float]

    @property
    def line(self) -> str:
        at = f"{self.share:<6.3g} {self.link_gbit:<12g} {self.share_there:<12.3f} {self.breakeven_overhead:<12.3f}"
        return at + "".join(f" {value:>9.1%}" for value in self.saving.values())


@dataclass(frozen=True)
class Breakeven:
    ratio: float
    baseline: str
    reference_gbit: float
    rows: list[BreakevenRow]

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> list[str]:
        columns = "".join(f"   k={float(k):<6g}" for k in self.rows[0].saving)
        return [
            f"saving against {self.baseline}, ratio {self.ratio:.2f}; "
            f"share: with bf16 on {self.reference_gbit:g} Gbit/s",
            "share  link Gbit/s  share there  break-even k" + columns,
            *(row.line for row in self.rows),
        ]


@dataclass(frozen=True)
class Offer:
    """A cluster at a price, in its fastest layout that fits. on_front: no other is both faster and cheaper."""

    provider: str
    gpu: str
    gpus: int
    kind: str
    usd_per_gpu_hour: float
    date: datetime.date
    network_gbit_per_gpu: float
    network_is_stated: bool
    hours: float
    usd: float
    layout: dict[str, Any]
    on_front: bool = False

    @property
    def line(self) -> str:
        return (
            f"{'*' if self.on_front else ' '} {self.hours / 24:8.1f} days  ${self.usd:>13,.0f}  "
            f"{self.gpus:>5} {self.gpu:<11} {self.provider} at ${self.usd_per_gpu_hour:.2f} ({self.kind}, {self.date})"
        ) + ("" if self.network_is_stated else ", network assumed")


@dataclass(frozen=True)
class Front:
    price_dates: Dates
    offers: list[Offer]
    left_out: list[str]

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> list[str]:
        found = [f"prices of {self.price_dates}", *(offer.line for offer in self.offers)]
        return found + [f"left out: {text}" for text in self.left_out]


@dataclass(frozen=True)
class PriceList:
    """newest: of the whole file. price_dates: of the prices shown. stale: how many older ones are left out."""

    newest: datetime.date
    price_dates: Dates
    prices: list[Price]
    stale: int
    max_age_days: int

    def facts(self) -> dict[str, Any]:
        return {name: plain(getattr(self, name)) for name in ("newest", "price_dates", "prices", "stale")}

    def lines(self) -> list[str]:
        found = [f"prices of {self.price_dates}"]
        found += [f"{p.gpu:<11} ${p.usd_per_gpu_hour:7.3f}  {p.provider}, {p.kind}, {p.date}" for p in self.prices]
        if self.stale:
            found.append(f"left out: {self.stale} prices older than {self.max_age_days} days (--max-age-days)")
        return found


@dataclass(frozen=True)
class StorageList:
    price_dates: Dates
    storage: list[StoragePrice]

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> list[str]:
        rows = [f"${p.usd_per_gb_month:.4f} a GB and month  {p.provider}, {p.kind} ({p.date})" for p in self.storage]
        return [f"prices of {self.price_dates}", *rows]


@dataclass(frozen=True)
class Check:
    """What is wrong with a snapshot of prices."""

    file: str
    problems: list[str]

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> list[str]:
        return self.problems or [f"{self.file}: nothing is wrong with it"]


@dataclass(frozen=True)
class Taken:
    """How many new prices a snapshot brought."""

    added: int

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> list[str]:
        return [f"{self.added} new prices"]

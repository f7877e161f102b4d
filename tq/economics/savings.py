"""What coded gradients save of one training job, as a closed form: the reference job, its interval, its waterfall.

The reference job of the book is `data/reference_job.csv`: every chapter on money, the calculator, the command line and
the index start from it and vary one thing at a time.

    case = reference(link_gbit=100)
    savings(case)["saving"]           share of the step, at the expected inputs
    sampled(case).saving              [SAMPLES], the four uncertain inputs drawn from their ranges

A step is compute, the codec, and what of the data-parallel exchange compute does not hide:

    T = C + max(R - 2/3 o C, 0) + max(G - 1/3 o C, 0)        T' likewise, with c, R' and G'

C: 6 FLOPs per parameter and token · R: the reduce-scatter of gradients, which only a backward pass can hide · G:
ZeRO-1's all-gather of weights in bf16, which runs behind the next forward pass. Without ZeRO both phases carry
gradients and hide behind the backward pass alone · c: every number encoded and decoded (without ZeRO the mean once
more) · o: `overlap`, the share of the compute during which the exchange can run: one micro-batch of many where
gradients accumulate.
`book/_static/calculators.js` mirrors this file; a test holds the two together.

Sources: Thakur et al. 2005 (ring collectives), Rajbhandari et al. 2020 (ZeRO), Roberts 2018 (the R sequence).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tq.economics import breakeven
from tq.economics.breakeven import Array, Step
from tq.economics.fields import BITS, BLOCK, SCALE, Case, Field, Result, read, stored_bits
from tq.economics.uncertainty import Uncertain
from tq.systems import tables

UNCERTAIN = ("tflops", "reach", "overlap", "codec_g")  # each with NAME_low and NAME_high
BACKWARD = 2 / 3  # of the compute
WEIGHT_BITS = 16  # of the weights that ZeRO-1's all-gather carries
NODE_GPUS = 8  # replicas smaller than a node reduce within it first, on NVLink, which takes no time here
SAMPLES = 1000
SURE, UNLIKELY = 0.8, 0.2  # chance of a saving from which on it pays, and down to which it does not
RANGE = "How sure is that"


@dataclass(frozen=True)
class Known:
    """A value of the reference job; low and high are equal to it where it is not uncertain."""

    value: float
    low: float
    high: float
    source: str


@cache
def job() -> dict[str, Known]:
    """The reference job by field. ValueError: the table is broken."""
    path = tables.folder() / "reference_job.csv"
    found = {}
    for line, row in enumerate(tables.read(path, ("name", "value", "low", "high", "source")), start=2):
        value, low, high = (
            tables.number(path, line, name, row[name] or row["value"]) for name in ("value", "low", "high")
        )
        found[row["name"]] = Known(value, low, high, row["source"])
    return found


def _uncertain(name: str, label: str, low: float, high: float, unit: str = "") -> list[Field]:
    known = job()[name]
    ends = (("low", known.low), ("high", known.high))
    return [
        Field(name, label, known.value, low, high, unit),
        *(Field(f"{name}_{end}", f"{label}: {end} end", value, low, high, unit, group=RANGE) for end, value in ends),
    ]


def _fields() -> tuple[Field, ...]:
    known = {name: each.value for name, each in job().items()}
    plain = (
        Field("parameters_b", "Parameters of the model", known["parameters_b"], 1e-3, 1e5, "billion"),
        Field("tokens_b", "Tokens of the run", known["tokens_b"], 1e-3, 1e6, "billion"),
        Field("batch_m", "Tokens per step", known["batch_m"], 1e-3, 1e4, "million"),
        Field("gpus", "GPUs", known["gpus"], 1, 1e6, whole=True),
        Field("gpus_per_replica", "GPUs per replica (tensor × pipeline)", known["gpus_per_replica"], 1, 1e6,
              whole=True),
        Field("link_gbit", "Network link per GPU", known["link_gbit"], 1e-3, 1e6, "Gbit/s"),
        Field("base_bits", "Gradients without compression", known["base_bits"], 16, 32, "bits",
              choices=((16, "bf16"), (32, "fp32"))),
        Field("zero", "Returned to every replica", known["zero"], 0, 1, whole=True,
              choices=((1, "weights in bf16 (ZeRO-1)"), (0, "gradients, quantized too (no ZeRO)"))),
        BITS, BLOCK, SCALE,
        Field("usd_per_gpu_hour", "Price", known["usd_per_gpu_hour"], 1e-3, 1e4, "USD per GPU-hour"),
    )  # fmt: skip
    unsure = (
        *_uncertain("tflops", "Speed of a GPU without gradient sync", 1e-2, 1e5, "TFLOP/s"),
        *_uncertain("reach", "Share of the link that a collective reaches", 1e-2, 1),
        *_uncertain("overlap", "Share of the compute that gradient sync can overlap with", 0, 1),
        *_uncertain("codec_g", "Speed of the codec, encoding or decoding", 1e-3, 1e6, "billion elements/s"),
    )
    return (*plain, *(f for f in unsure if not f.group), *(f for f in unsure if f.group))


FIELDS = _fields()


def widened(case: Case) -> dict[str, float]:
    """The case with each range grown to hold its value: who changes a value need not change the range."""
    found = dict(case)
    for name in UNCERTAIN:
        value, low, high = case[name], f"{name}_low", f"{name}_high"
        found[low], found[high] = min(case[low], value), max(case[high], value)
    return found


def reference(**changes: float) -> dict[str, float]:
    """The reference job with some fields changed; ranges grow to hold a changed value. ValueError: no such field."""
    unknown = set(changes) - {field.name for field in FIELDS}
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; accepted are {', '.join(f.name for f in FIELDS)}")
    return widened({field.name: field.default for field in FIELDS} | changes)


def exactly(case: Case) -> dict[str, float]:
    """The case with no range: every uncertain input is its expected value."""
    return {**case, **{f"{name}_{end}": case[name] for name in UNCERTAIN for end in ("low", "high")}}


# --- one step -------------------------------------------------------------------------------------------------


def _check(case: Case) -> dict[str, float]:
    x = read("savings", FIELDS, case)
    if x["gpus_per_replica"] > x["gpus"]:
        raise ValueError(f"gpus_per_replica must be at most gpus={x['gpus']:g}, got {x['gpus_per_replica']:g}")
    if x["base_bits"] <= stored_bits(x):
        raise ValueError(f"bits must leave less than base_bits={x['base_bits']:g} with scales, got {stored_bits(x):g}")
    for name in UNCERTAIN:
        if not x[f"{name}_low"] <= x[name] <= x[f"{name}_high"]:
            raise ValueError(
                f"{name}_low must be at most {name}={x[name]:g} and {name}_high at least that, "
                f"got {x[f'{name}_low']:g} and {x[f'{name}_high']:g}"
            )
    return x


@dataclass(frozen=True)
class Times:
    """Seconds of a step without and with codes, and their parts; numbers, or one for each sample."""

    compute: Array
    exchange: Array
    coded_exchange: Array
    exposed: Array
    coded_exposed: Array
    codec: Array  # none of it is hidden

    @property
    def plain(self) -> Array:
        return self.compute + self.exposed

    @property
    def coded(self) -> Array:
        return self.compute + self.codec + self.coded_exposed

    @property
    def saving(self) -> Array:
        """Share of the step that codes save; negative where they cost."""
        return 1 - self.coded / self.plain


def passes(replicas: float, zero: float) -> float:
    """How often a number is encoded or decoded in a step. ZeRO-1: encoded, and decoded where it is reduced. Without:
    the mean is encoded and decoded once more, 1 / n of it on each rank."""
    if replicas <= 1:
        return 0.0
    return 2.0 if zero else 3.0 + 1.0 / replicas


def _step(x: Case, tflops: ArrayLike) -> Step:
    step = Step.of(
        x["parameters_b"] * 1e9, x["batch_m"] * 1e6, x["gpus"], x["gpus_per_replica"], tflops, x["base_bits"]
    )  # fmt: skip
    back, local = WEIGHT_BITS if x["zero"] else None, max(1.0, NODE_GPUS // x["gpus_per_replica"])
    return replace(step, weight_bits=back, local=local)


def _times(x: Case, drawn: Mapping[str, Any]) -> Times:
    step = _step(x, drawn["tflops"])
    ratio, rate = x["base_bits"] / stored_bits(x), x["link_gbit"] * np.asarray(drawn["reach"])
    numbers = passes(float(step.replicas), x["zero"]) * float(step.numbers)
    compute, cover = np.asarray(step.compute_s, float), np.asarray(drawn["overlap"], float)
    whole = step.exchange_s(rate)
    reduce = whole * _gradients(x)
    gather = whole - reduce
    return Times(
        compute, whole, reduce / ratio + gather,
        _exposed(reduce, gather, cover * compute), _exposed(reduce / ratio, gather, cover * compute),
        numbers / (np.asarray(drawn["codec_g"]) * 1e9),
    )  # fmt: skip


def _gradients(x: Case) -> float:
    """Share of the bytes that are gradients."""
    return x["base_bits"] / (x["base_bits"] + WEIGHT_BITS) if x["zero"] else 1.0


def _exposed(reduce: Array, gather: Array, cover: Array) -> Array:
    """What is waited for of gradients and of weights that return: neither can use the other's cover."""
    return np.maximum(reduce - BACKWARD * cover, 0.0) + np.maximum(gather - (1 - BACKWARD) * cover, 0.0)


def times(case: Case, **drawn: ArrayLike) -> Times:
    """Seconds of a step at the expected inputs, or at others of the uncertain ones: numbers, or arrays of samples."""
    x = _check(case)
    if not set(drawn) <= set(UNCERTAIN):
        raise ValueError(f"uncertain are {', '.join(UNCERTAIN)}; got {', '.join(drawn)}")
    return _times(x, {name: x[name] for name in UNCERTAIN} | drawn)


def inputs(case: Case) -> dict[str, Uncertain]:
    """The ranges of the uncertain inputs: half of the draws lie below the expected value and half above, evenly; of the
    codec's speed, whose ends are two orders of magnitude apart, evenly in its logarithm."""
    x = _check(case)
    shapes = {name: "log-halves" if name == "codec_g" else "halves" for name in UNCERTAIN}
    return {
        name: Uncertain(x[f"{name}_low"], x[name], x[f"{name}_high"], shape) for name, shape in shapes.items()
    }


def _sequence(dimensions: int) -> Array:
    """[SAMPLES, dimensions] evenly spread points of the unit cube (R sequence): the same on every machine and page."""
    root = 2.0
    for _ in range(60):
        root = (1 + root) ** (1 / (dimensions + 1))
    steps = np.array([root ** -(each + 1) for each in range(dimensions)])
    return (0.5 + np.arange(1, SAMPLES + 1)[:, None] * steps) % 1.0


def sampled(case: Case) -> Times:
    """[SAMPLES] steps with the uncertain inputs drawn from `inputs(case)`. Two cases get the same draws, so that their
    samples can be compared one by one."""
    points = _sequence(len(UNCERTAIN))
    return _times(case, {name: each.at(points[:, i]) for i, (name, each) in enumerate(inputs(case).items())})


def _breakeven_gbit(x: Case, codec_s: float) -> float:
    """Link rate above which codes do not pay. The gain falls as the link gets faster, so bisection finds where it is
    the codec's time; inf where the codec takes no time, 0 where codes pay on no link."""

    def gain(gbit: float) -> float:
        found = _times({**x, "link_gbit": gbit}, {name: x[name] for name in UNCERTAIN})
        return float(found.exposed - found.coded_exposed)

    low, high = 1e-6, 1e12
    if gain(low) <= codec_s:
        return 0.0
    if gain(high) > codec_s or codec_s == 0:
        return math.inf
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > codec_s else (low, middle)
    return math.sqrt(low * high)


def savings(case: Case) -> Result:
    """Time, cost and saving of a training run with quantized gradient sync.

    The formula stands at the head of ``tq.economics.savings``. Sources: Thakur et al. 2005 (ring collectives) and
    Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054).

    Args:
        case: every field of ``FIELDS["savings"]``; ``defaults("savings")`` is the book's reference job.
    Returns:
        A dict of numbers at the expected inputs, without quantization and ("coded" in the name) with it.
        "compute_s", "exchange_s", "codec_s", "plain_s" and "coded_s" are seconds per step, "plain_hours", "plain_usd"
        and so on are hours and USD per run. "saving" is the share of the step time that quantization saves, "share"
        that of communication that is not overlapped, "ratio" how many times smaller gradients get. Of random draws of
        the uncertain inputs, a tenth is below NAME_low, a tenth above NAME_high, half below "saving_median"; "chance"
        is the share of draws that save time. "pays" is 1 for a chance of at least 0.8, -1 for at most 0.2, else 0.
        "breakeven_gbit" is the link rate above which it does not pay (None: it pays at any), "breakeven_codec_g" the
        codec speed below which it does not, in billion numbers per second (None: it pays at no speed).
    Raises:
        ValueError: if a field is missing, unknown or out of range, or the fields contradict each other.
    Example:
        >>> from tq.economics.calculator import defaults, savings
        >>> slow, fast = (savings({**defaults("savings"), "link_gbit": gbit}) for gbit in (10, 400))
        >>> slow["pays"], round(slow["saving"], 1), round(fast["saving"], 1)
        (1.0, 0.3, 0.0)
    """
    x = _check(case)
    at, many = times(x), sampled(x)
    ratio = x["base_bits"] / stored_bits(x)
    steps, usd_per_s = x["tokens_b"] * 1e3 / x["batch_m"], x["gpus"] * x["usd_per_gpu_hour"] / 3600
    low, mid, high = (float(q) for q in np.quantile(many.saving, (0.1, 0.5, 0.9)))
    usd_low, usd_high = (float(q) * steps * usd_per_s for q in np.quantile(many.plain - many.coded, (0.1, 0.9)))
    chance = float(np.mean(many.saving > 0))
    plain, coded, gain = float(at.plain), float(at.coded), float(at.exposed - at.coded_exposed)
    limit = _breakeven_gbit(x, float(at.codec))
    coding = float(at.codec) * x["codec_g"]
    return {
        "ratio": ratio,
        "compute_s": float(at.compute),
        "exchange_s": float(at.exchange),
        "coded_exchange_s": float(at.coded_exchange),
        "codec_s": float(at.codec),
        "share": float(at.exposed) / plain,
        "plain_s": plain,
        "coded_s": coded,
        "saving": 1 - coded / plain,
        "saving_low": low,
        "saving_high": high,
        "saving_median": mid,
        "chance": chance,
        "plain_hours": steps * plain / 3600,
        "coded_hours": steps * coded / 3600,
        "plain_usd": steps * plain * usd_per_s,
        "coded_usd": steps * coded * usd_per_s,
        "saved_usd": steps * (plain - coded) * usd_per_s,
        "saved_usd_low": usd_low,
        "saved_usd_high": usd_high,
        "breakeven_gbit": limit if math.isfinite(limit) else None,
        "breakeven_codec_g": coding / gain if gain > 0 else None,
        "pays": 1.0 if chance >= SURE else -1.0 if chance <= UNLIKELY else 0.0,
    }


# --- from the whitepaper's saving to the reference job's ------------------------------------------------------------


def waterfall(claimed: tuple[float, float], shares: tuple[float, float]) -> list[tuple[str, float]]:
    """[(cause, saving after it)] from the middle of the claimed savings to the reference job's, one cause at a time, in
    this order; the last is `savings(reference())["saving"]`. shares: the communication shares that are claimed."""
    fp32 = float(breakeven.ratio(base_bits=32))
    share = sum(shares) / 2
    free = {"codec_g": 1e6, "reach": 1.0, "overlap": 0.0, "base_bits": 32.0, "zero": 0.0}

    def at(**given: float) -> float:
        saved: float = float(times(reference(**given)).saving)
        return saved

    found = [
        ("claimed, middle of the range", sum(claimed) / 2),
        ("Amdahl's law at its own shares", float(breakeven.saving(share, 8.0))),
        ("scales are stored too", float(breakeven.saving(share, fp32))),
    ]
    causes = (
        ("the share of this gradient sync at 400 Gbit/s", None), ("gradients were bf16", "base_bits"),
        ("ZeRO-1 returns weights", "zero"), ("a collective reaches 85 % of the link", "reach"),
        ("compute hides a part", "overlap"), ("the codec takes time", "codec_g"),
    )  # fmt: skip
    for cause, name in causes:
        if name is not None:
            del free[name]
        found.append((cause, at(**free)))
    return found

"""From uncertain inputs to an interval of the answer, and to the inputs that it hangs on.

`monte_carlo` calls a vectorised function once, with arrays of samples. `tornado` moves one input at a time between its
ends, the others at their middle. `sobol` splits the variance of the answer: SALib where it is installed, else the same
estimators here; `method` says which. Inputs are independent: what moves together has to be one input.
Sources: Jansen 1999 (total), Saltelli et al. 2010 (first order).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq.economics.intervals import Interval
from tq.systems.arguments import positive_int

Array = NDArray[np.float64]
Function = Callable[..., Any]  # of keyword arguments, each an array [n] or a number; returns [n]

MAX_SAMPLES = 10_000_000  # more do not fit the memory of a usual machine
SHAPES = ("triangular", "uniform", "halves", "log-halves", "loguniform", "quantiles")


@dataclass(frozen=True)
class Uncertain:
    """low, mid, high and how samples lie between: "triangular" (most at mid), "halves" (uniform on either side of mid,
    half of them each: mid is the median), "log-halves" (the same of the logarithm), "uniform" and "loguniform" (mid
    unused). Or "quantiles": low and high are what one sample in ten falls below and above, mid the median (log-logistic
    on either side)."""

    low: float
    mid: float
    high: float
    shape: str = "triangular"

    def __post_init__(self) -> None:
        Interval(self.low, self.mid, self.high)  # finite and in order, or it raises
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}; got {self.shape!r}")
        if self.shape in ("loguniform", "log-halves", "quantiles") and self.low <= 0:
            raise ValueError(f"low must be positive for shape={self.shape!r}, got {self.low}")

    @classmethod
    def around(cls, value: float, relative: float, shape: str = "triangular") -> Uncertain:
        """value, give or take so large a share of it."""
        if not 0 <= relative < 1:
            raise ValueError(f"relative must be within [0, 1), got {relative}")
        ends = value * (1 - relative), value * (1 + relative)
        return cls(min(ends), value, max(ends), shape)

    @classmethod
    def of(cls, interval: Interval, shape: str = "triangular") -> Uncertain:
        return cls(interval.low, interval.mid, interval.high, shape)

    def at(self, u: Array) -> Array:
        """Quantiles at u in [0, 1]."""
        width = self.high - self.low
        if width == 0:
            return np.full_like(u, self.low)
        if self.shape == "uniform":
            return self.low + width * u
        if self.shape == "loguniform":
            return self.low * np.exp(u * math.log(self.high / self.low))
        if self.shape == "halves":
            return np.interp(u, [0.0, 0.5, 1.0], [self.low, self.mid, self.high])
        if self.shape == "log-halves":
            return np.exp(np.interp(u, [0.0, 0.5, 1.0], np.log([self.low, self.mid, self.high])))
        if self.shape == "quantiles":
            inside = np.clip(u, 1e-9, 1 - 1e-9)
            steps = np.log(inside / (1 - inside)) / math.log(9.0)  # -1 at one in ten, +1 at nine in ten
            return self.mid * np.where(u < 0.5, self.mid / self.low, self.high / self.mid) ** steps
        split = (self.mid - self.low) / width
        rising = self.low + np.sqrt(u * width * (self.mid - self.low))
        falling = self.high - np.sqrt((1 - u) * width * (self.high - self.mid))
        return np.where(u < split, rising, falling)


Inputs = Mapping[str, Uncertain]


def _check(inputs: Inputs, samples: int) -> None:
    if not inputs:
        raise ValueError("inputs must name at least one uncertain input")
    if isinstance(samples, bool) or not isinstance(samples, int) or not 2 <= samples <= MAX_SAMPLES:
        raise ValueError(f"samples must be an int of at least 2 and at most {MAX_SAMPLES}, got {samples!r}")


def sample(inputs: Inputs, samples: int = 10_000, seed: int = 0) -> dict[str, Array]:
    """{name: [samples]}, a Latin hypercube: every input has one sample in each of `samples` equally likely slices."""
    _check(inputs, samples)
    positive_int("seed", seed, 0)
    rng = np.random.default_rng(seed)
    slices = np.arange(samples)
    return {name: each.at((rng.permutation(slices) + rng.random(samples)) / samples) for name, each in inputs.items()}


def _call(function: Function, arguments: Mapping[str, Array], samples: int) -> Array:
    values = np.broadcast_to(np.asarray(function(**arguments), float), (samples,))
    if not np.all(np.isfinite(values)):
        raise ValueError(f"the function gave {int((~np.isfinite(values)).sum())} values that are not finite")
    return values


@dataclass(frozen=True)
class Distribution:
    """Samples of an answer."""

    values: Array

    def interval(self, level: float = 0.8) -> Interval:
        """Median within the central `level` of the samples."""
        if not 0 < level < 1:
            raise ValueError(f"level must be within (0, 1), got {level}")
        low, mid, high = np.quantile(self.values, [(1 - level) / 2, 0.5, (1 + level) / 2])
        return Interval(float(low), float(mid), float(high))

    def share(self, above: float = 0.0) -> float:
        """Share of the samples above a value: with a saving, the chance that it pays."""
        return float(np.mean(self.values > above))


def monte_carlo(function: Function, inputs: Inputs, samples: int = 10_000, seed: int = 0) -> Distribution:
    """The answer over samples of its inputs; the same seed gives the same samples."""
    return Distribution(_call(function, sample(inputs, samples, seed), samples))


@dataclass(frozen=True)
class Bar:
    """One bar of a tornado: the answer with this input at its low and at its high end."""

    name: str
    at_low: float
    at_high: float
    middle: float

    @property
    def swing(self) -> float:
        return abs(self.at_high - self.at_low)


def tornado(function: Function, inputs: Inputs) -> list[Bar]:
    """One input at a time between its ends, the others at mid; the largest swing first."""
    _check(inputs, 2)
    rows = {name: np.full(1 + 2 * len(inputs), each.mid) for name, each in inputs.items()}
    for position, (name, each) in enumerate(inputs.items()):
        rows[name][1 + 2 * position : 3 + 2 * position] = each.low, each.high
    found = _call(function, rows, 1 + 2 * len(inputs)).tolist()
    bars = [Bar(name, found[1 + 2 * i], found[2 + 2 * i], found[0]) for i, name in enumerate(inputs)]
    return sorted(bars, key=lambda bar: -bar.swing)


@dataclass(frozen=True)
class Sensitivity:
    """Shares of the answer's variance by input: alone (`first`), and with its interactions (`total`)."""

    first: dict[str, float]
    total: dict[str, float]
    method: str


def sobol(
    function: Function, inputs: Inputs, samples: int = 4096, seed: int = 0, use_salib: bool | None = None
) -> Sensitivity:
    """Sobol indices from (inputs + 2) * samples calls; samples: a power of two. use_salib None: if it is installed."""
    _check(inputs, samples)
    if samples & (samples - 1):
        raise ValueError(f"samples must be a power of two, got {samples}")
    installed = importlib.util.find_spec("SALib") is not None
    if use_salib and not installed:
        raise ValueError("use_salib=True, but SALib is not installed")
    if installed if use_salib is None else use_salib:
        return _sobol_salib(function, inputs, samples, seed)
    names, count = list(inputs), len(inputs)
    rng = np.random.default_rng(seed)
    a, b = rng.random((samples, count)), rng.random((samples, count))

    def answer(u: Array) -> Array:
        return _call(function, {name: inputs[name].at(u[:, i]) for i, name in enumerate(names)}, len(u))

    mixed = np.concatenate([a, b, *(np.where(np.arange(count) == i, b, a) for i in range(count))])
    f_a, f_b, *f_ab = answer(mixed).reshape(count + 2, samples)
    variance = np.concatenate([f_a, f_b]).var()
    if variance == 0:
        raise ValueError("the answer does not depend on any of the inputs")
    first = {name: float(np.mean(f_b * (f - f_a)) / variance) for name, f in zip(names, f_ab, strict=True)}
    total = {name: float(np.mean((f_a - f) ** 2) / 2 / variance) for name, f in zip(names, f_ab, strict=True)}
    return Sensitivity(first, total, "Saltelli 2010 and Jansen 1999, own implementation")


def _sobol_salib(function: Function, inputs: Inputs, samples: int, seed: int) -> Sensitivity:
    from SALib.analyze import sobol as analyze
    from SALib.sample import sobol as draw

    names = list(inputs)
    problem = {"num_vars": len(names), "names": names, "bounds": [[0.0, 1.0]] * len(names)}
    u = draw.sample(problem, samples, calc_second_order=False, seed=seed)
    values = _call(function, {name: inputs[name].at(u[:, i]) for i, name in enumerate(names)}, len(u))
    if values.var() == 0:
        raise ValueError("the answer does not depend on any of the inputs")
    found = analyze.analyze(problem, values, calc_second_order=False, seed=seed)
    first, total = (dict(zip(names, map(float, found[key]), strict=True)) for key in ("S1", "ST"))
    return Sensitivity(first, total, "SALib")

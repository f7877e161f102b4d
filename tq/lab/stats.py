"""Quartiles of repeats, and gaps between runs that share their seeds, with Student intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

WINDOWS = 15  # that a run's training loss is cut into


class Recorder(Protocol):
    """What takes results down: ``tq.book.results.Chapter``, which lies above this floor."""

    def record(
        self, key: str, value: Any, unit: str = "1", *,
        low: float | None = None, high: float | None = None, spread: str = "none", n: int = 1,
    ) -> Any: ...  # fmt: skip


def plain(value: Any) -> Any:
    """NumPy scalars and one-element tensors become the Python number that they hold."""
    return value.item() if hasattr(value, "item") else value


def number(argument: str, value: Any) -> float:
    """The value as a float; TypeError for what is no number, ValueError for NaN and infinities."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument}={value!r}: a number is needed")
    if not math.isfinite(value):
        raise ValueError(f"{argument}={value!r}: NaN and infinities are no results; None says 'not measured'")
    return float(value)


def quartiles(samples: Iterable[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile), linear between order statistics as in `numpy.quantile`."""
    ordered = sorted(number("samples", value) for value in samples)
    if not ordered:
        raise ValueError("samples: empty; at least one is needed")

    def at(fraction: float) -> float:
        position = fraction * (len(ordered) - 1)
        below = math.floor(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (position - below) * (ordered[above] - ordered[below])

    return at(0.25), at(0.5), at(0.75)


@dataclass(frozen=True)
class Gap:
    """Mean of paired differences over seeds; half_width: of its 95 % confidence interval (Student), nan for n = 1."""

    mean: float
    half_width: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (f" ± {self.half_width:.4f}" if self.n > 1 else "")

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def gap(losses: Sequence[float], baseline: Sequence[float]) -> Gap:
    """Paired: both in the order of the seeds. Differences that are not finite make the gap so."""
    from scipy.stats import t

    differences = [a - b for a, b in zip(losses, baseline, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    if n == 1:
        return Gap(mean, math.nan, 1)
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    return Gap(mean, float(t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), n)


def record(ch: Recorder, key: str, found: Gap) -> Any:
    """Records a gap in nats, with its interval if it has one; None where a run was no longer finite."""
    if not math.isfinite(found.half_width):
        return ch.record(key, found.mean if math.isfinite(found.mean) else None, "nats")
    low = found.mean - found.half_width
    return ch.record(key, found.mean, "nats", low=low, high=found.high, spread="ci95", n=found.n)


def smoothed(coded: Sequence[Tensor], plain: Sequence[Tensor]) -> Tensor:
    """Gaps of the training losses of pairs, each [steps]: [pairs, window ends], means of a fifteenth of the steps."""
    import torch

    curve = torch.stack([a - b for a, b in zip(coded, plain, strict=True)])
    return curve.unfold(1, max(1, curve.shape[1] // WINDOWS), 1).mean(2)


def around(line: Tensor, step: int, steps: int) -> float:
    """The value of one such line for the window in the middle of which a step of the run lies."""
    start = step - max(1, steps // WINDOWS) // 2
    if not 0 <= start < len(line):
        raise ValueError(f"step={step!r}: too near to an end of the {steps} steps")
    return float(line[start])

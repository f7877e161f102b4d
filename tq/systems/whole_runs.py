"""Hours of whole training runs, as intervals: what published runs realised of the peak, from first step to last token.

A whole run also restarts, waits, evaluates, and starts on software that is still slow. Published runs realised 14 to
51 % of the peak (6 N D over hours and peak), and a model of the step does not narrow that: no source prints the layout
and the software of a whole run beside its hours. So the interval is that of the published shares themselves: predictive
quantiles of the fit rows of `data/published_runs.csv`, at ranks q (n + 1), which would hold 80 % of runs drawn alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tq.systems.arguments import positive
from tq.systems.hardware import gpu as known_gpu
from tq.systems.iteration import Prediction
from tq.systems.validation import published

FLOPS_A_PARAMETER = 6.0  # and token; attention scores are left out, as published shares leave them out


@dataclass(frozen=True)
class Hours:
    """Accelerator-hours of a whole run: median of what is to be expected, and the ends of the interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class RunRow:
    """A published whole run, in accelerator-hours, and its interval from fit rows other than itself."""

    id: str
    gpu: str
    split: str
    published: float
    predicted: Hours
    realised: float

    @property
    def error(self) -> float:
        return self.predicted.median / self.published - 1

    @property
    def covered(self) -> bool:
        return self.predicted.low <= self.published <= self.predicted.high


def _flops(parameters: float, tokens: float) -> float:
    return FLOPS_A_PARAMETER * parameters * tokens


def _whole_runs() -> list[dict[str, str]]:
    return [row for row in published() if row["metric"].startswith("accelerator-hours") and row["tokens"]]


def _share(row: dict[str, str]) -> float:
    flops = _flops(float(row["params_B"]) * 1e9, float(row["tokens"]))
    return flops / (float(row["published_value"]) * 3600 * known_gpu(row["gpu_type"]).peak_flops)


def realised_shares(without: str | None = None) -> list[float]:
    """Share of the peak that each published whole run of the fit rows realised; without: leave this id out."""
    return [_share(row) for row in _whole_runs() if row["split"] == "fit" and row["id"] != without]


def quantile(shares: Sequence[float], q: float) -> float:
    """Predictive quantile: the order statistic of rank q (n + 1), interpolated in the log; the ends beyond them."""
    ordered = np.sort(np.log(shares))
    return float(np.exp(np.interp(q * (len(ordered) + 1), np.arange(1, len(ordered) + 1), ordered)))


def accelerator_hours(
    parameters: float, tokens: float, gpu: str, *, share: float = 0.8, without: str | None = None
) -> Hours:
    """Hours to train so many parameters (active ones, of a mixture of experts) on so many tokens, summed over GPUs.
    share: of runs that the interval is to hold."""
    positive("parameters", parameters)
    positive("tokens", tokens)
    positive("share", share, most=0.99)
    shares = realised_shares(without)
    ideal = _flops(parameters, tokens) / (3600 * known_gpu(gpu).peak_flops)
    tail = (1 - share) / 2
    return Hours(ideal / quantile(shares, 0.5), ideal / quantile(shares, 1 - tail), ideal / quantile(shares, tail))


def uninterrupted_hours(prediction: Prediction, tokens: float, gpus: int) -> Hours:
    """Accelerator-hours of a run whose every iteration takes the predicted time: no restart, no evaluation."""
    positive("tokens", tokens)
    steps = tokens / prediction.tokens_per_iteration
    low, high = prediction.interval
    return Hours(*(float(steps * t * gpus / 3600) for t in (prediction.iteration_s, low, high)))


def run_table() -> list[RunRow]:
    """Every published whole run with its interval; a fit row is left out of the shares that predict it."""
    found = []
    for row in _whole_runs():
        hours = accelerator_hours(
            float(row["params_B"]) * 1e9, float(row["tokens"]), row["gpu_type"], without=row["id"]
        )
        found.append(
            RunRow(row["id"], row["gpu_type"], row["split"], float(row["published_value"]), hours, _share(row))
        )
    return found


def coverage(rows: Sequence[RunRow]) -> float:
    """Share of the rows whose published hours lie in their interval."""
    if not rows:
        raise ValueError("no row is left to count")
    return sum(row.covered for row in rows) / len(rows)

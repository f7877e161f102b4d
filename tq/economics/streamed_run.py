"""Training on one card whose states lie on a drive: seconds of a step, the drives that it wears out, and dollars.

Transfers and computation overlap; the drive serves reads and writes in turn. Not modelled: a second drive, states that
stay in memory, the price of computer and card, and what a drive still does past its warranty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tq.economics.intervals import Interval
from tq.economics.uncertainty import Uncertain, monte_carlo
from tq.systems import tiers

DAY_S, YEAR_S = 86_400.0, 3.156e7
FLOPS = 8.0  # per parameter and token: 2 forward, 2 for the forward pass again, 4 backward


def read_bytes(weight_bytes: float, moment_bytes: float) -> float:
    """Per parameter and step: weights in the forward pass, weights and moments in the backward pass."""
    return 2 * weight_bytes + moment_bytes


def costs(
    *, parameters: Any, tokens_per_step: Any, flops_per_s: Any, drive_bytes_per_s: Any, endurance_bytes: Any,
    amplification: Any, drive_usd: Any, kilowatts: Any, usd_per_kwh: Any, weight_bytes: Any = 4.0,
    moment_bytes: Any = 8.0,
) -> dict[str, Any]:  # fmt: skip
    """Numbers or arrays [n] of them.

    Returns:
        step_s; hidden: 1 where the computation covers the transfers, else 0; steps_of_a_drive, tokens_of_a_drive and
        days_of_a_drive until its warranted bytes are written; usd_of_a_token: drives and electricity; wear: share of
        drives in it.
    """
    compute_s = FLOPS * parameters * tokens_per_step / flops_per_s
    written = parameters * (weight_bytes + moment_bytes)
    moved_s = (parameters * read_bytes(weight_bytes, moment_bytes) + written) / drive_bytes_per_s
    step_s = np.maximum(compute_s, moved_s)
    steps = tiers.steps_of_a_drive(endurance_bytes, written, amplification)
    wear, energy = drive_usd / steps, step_s / 3600 * kilowatts * usd_per_kwh  # dollars per step
    return {
        "step_s": step_s, "hidden": np.asarray(compute_s >= moved_s, float), "steps_of_a_drive": steps,
        "tokens_of_a_drive": steps * tokens_per_step, "days_of_a_drive": steps * step_s / DAY_S,
        "usd_of_a_token": (wear + energy) / tokens_per_step, "wear": wear / (wear + energy),
    }  # fmt: skip


def run(tokens: float, **given: Any) -> dict[str, Any]:
    """Of a run over so many tokens: years, drives and usd; given: as ``costs`` takes them."""
    each = costs(**given)
    steps = tokens / given["tokens_per_step"]
    return {
        "years": steps * each["step_s"] / YEAR_S, "drives": steps / each["steps_of_a_drive"],
        "usd": tokens * each["usd_of_a_token"],
    }  # fmt: skip


def intervals(
    inputs: Mapping[str, Uncertain], tokens: float = 0.0, samples: int = 10_000, seed: int = 0, level: float = 0.8,
    **fixed: Any,
) -> dict[str, Interval]:  # fmt: skip
    """Median within the central ``level`` of the samples, of all that ``costs`` returns, and ``run`` if tokens > 0."""

    def everything(**drawn: Any) -> dict[str, Any]:
        given = {**fixed, **drawn}
        return costs(**given) | (run(tokens, **given) if tokens > 0 else {})

    middle = {name: each.mid for name, each in inputs.items()}

    def one(name: str) -> Interval:
        return monte_carlo(lambda **drawn: everything(**drawn)[name], inputs, samples, seed).interval(level)

    return {name: one(name) for name in everything(**middle)}

"""Rules over budgets, the cost of an operation over time, and serving beside training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from tq.book.claims.formulas import Figure, RangeFormula
from tq.book.claims.ledger import Rule, table
from tq.systems import hardware

# --- budgets of three tiers, whose GPUs the document lists beside them -------------------------------------------

TIERS = {  # words -> (dollars, GPUs) of the low and of the high end
    "academic": ((1e3, 1), (100e3, 16)),
    "enterprise": ((1e6, 100), (100e6, 10_000)),
    "frontier": ((100e6, 10_000), (5e9, 250_000)),
}


def _offers(gpu: str) -> dict[str, float]:
    """provider -> dollars per hour on demand of `data/prices.csv`."""
    rows = table("prices.csv")
    return {
        row["provider"]: float(row["usd_per_gpu_hour"])
        for row in rows if row["gpu"] == gpu and row["kind"] == "on-demand"
    }  # fmt: skip


def _days() -> dict[str, Figure]:
    """Days that each end of a budget rents its GPUs for, at the median price of an H100."""
    price = statistics.median(_offers("h100-80gb").values())
    return {
        f"{tier}, {end} end": usd / (gpus * 24 * price)
        for tier, ends in TIERS.items() for end, (usd, gpus) in zip(("low", "high"), ends, strict=True)
    }  # fmt: skip


# --- dollars per operation --------------------------------------------------------------------------------------

NEWER = (("a100-80gb", "h100-80gb"), ("h100-80gb", "b200-192gb"))
AWS_CUT = 0.44  # of the H100 in June 2025 (data/sources.csv)
NEBIUS = 2.95  # dollars per H100-hour of an earlier catalogue (data/sources.csv)


def _steps() -> Iterable[float]:
    """Operations per dollar of a generation over those of the one before, at each provider that rents both."""
    for old, new in NEWER:
        before, after = _offers(old), _offers(new)
        faster = hardware.gpu(new).peak_flops / hardware.gpu(old).peak_flops
        for provider in before.keys() & after.keys():
            yield faster * before[provider] / after[provider]


def _cheaper() -> dict[str, Figure]:
    return {
        "smallest step from one generation to the next": min(_steps()),
        "the same H100 at AWS over 2025": 1 / (1 - AWS_CUT),
        "the same H100 at Nebius over 2026": NEBIUS / _offers("h100-80gb")["nebius"],
    }


# --- serving beside training ------------------------------------------------------------------------------------

SERVED = 480e12 * 12  # tokens in a year at the rate that Google reported for May 2025 (data/sources.csv)
TRAINED = 15e12  # tokens of Llama 3's training
DWARFS = 10.0  # times the training


def _served() -> dict[str, Figure]:
    """Operations of a year of serving, 2 per parameter and token, over those of training one model, 6 of them."""
    return {"a year of Google's tokens": 2 * SERVED / (6 * TRAINED)}


RULES: dict[str, Rule] = {
    "S4-014": RangeFormula(
        "dollars / (GPUs * 24 * median price of an H100-hour), a week to a year", _days,
        "At the median dated price the budgets rent their GPUs for {0:.0f} and {1:.0f} days (academic), {2:.0f} and "
        "{3:.0f} (enterprise), {4:.0f} and {5:.0f} (frontier), which is a week to a year.",
        "A tier whose runs take less than a week or more than a year.", "days", claimed=(7.0, 365.0), within=0.0,
        confidence="medium",
    ),
    "S4-114": RangeFormula(
        "2 * tokens served / (6 * tokens trained), for one size of model; ten times or more dwarfs", _served,
        "A year at the 480 trillion tokens a month that Google reported for May 2025 is computed to take {0:.0f} times "
        "the operations of training on 15 trillion. Serving overtakes training at {1:.0f} trillion tokens.",
        "The sizes of the models that served them, and dollars of both.", "times the training",
        conditions=lambda: {"trillion tokens at which both are equal": 3 * TRAINED / 1e12}, claimed=(DWARFS, 1e9),
        within=0.0, confidence="low",
    ),
    "S4-156": RangeFormula(
        "operations per dollar, later over earlier (data/prices.csv, data/sources.csv)", _cheaper,
        "Operations per dollar grow at least {0:.2f}-fold with a generation at providers that rent both. AWS made the "
        "H100 {1:.1f} times cheaper in 2025; Nebius's hour rose by a third in 2026 ({2:.2f}).",
        "Price lists of one GPU over several years.", "x", claimed=(1.0, 1e9), within=0.0, confidence="medium",
    ),
}  # fmt: skip

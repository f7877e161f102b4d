"""Arms of a comparison beside a baseline: gaps with intervals, and tests of equivalence corrected for their number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tq.lab import stats
from tq.lab.equivalence import LEVEL, equivalence, holm
from tq.train.experiments.own_rates import Tuned


@dataclass(frozen=True)
class Judged:
    """arm: at its own rate, on the fresh seeds. gap: to the baseline on the same seeds, nats per token. margin, p: of
    the two one-sided tests, by Holm over the arms that were judged together."""

    arm: Tuned
    gap: stats.Gap
    margin: float
    p: float

    @property
    def equivalent(self) -> bool:
        return self.p < LEVEL

    @property
    def finite(self) -> bool:
        """Whether all runs stayed finite."""
        return math.isfinite(self.gap.mean)

    @property
    def sent(self) -> float:
        """Bits per element and step after the start in fp32, over those of an all-reduce that sends each twice."""
        run, outcome = self.arm.run, self.arm.outcomes[0]
        if self.arm.run.variant == "exact":
            return 32.0
        share = run.warmup / run.steps
        return float((outcome["bits"] - 32 * share) / (1 - share))

    @property
    def drift(self) -> float:
        """Largest distance of replicas at the end of a run, relative to the length of the weights."""
        return max(float(outcome["drift"]) for outcome in self.arm.outcomes)

    def __str__(self) -> str:
        return str(self.gap) if self.finite else "not finite"


def judge(arms: Mapping[str, Tuned], baseline: Tuned, margin: float) -> dict[str, Judged]:
    """Every arm beside the baseline, whose fresh seeds are theirs (``ValueError`` if not)."""
    for name, arm in arms.items():
        if arm.run.seed != baseline.run.seed or len(arm.outcomes) != len(baseline.outcomes):
            raise ValueError(f"{name} has other seeds than the baseline")
    adjusted = holm({name: equivalence(arm.losses, baseline.losses, margin).p for name, arm in arms.items()})
    return {
        name: Judged(arm, stats.gap(arm.losses, baseline.losses), margin, adjusted[name]) for name, arm in arms.items()
    }


def record(ch: stats.Recorder, judged: Mapping[str, Judged], under: str = "") -> None:
    """Records of every arm, under its name: gap, gap-high, p, equivalent, lr, lr-at-an-end, sent and drift."""
    for name, one in judged.items():
        key, n = f"{under}{slug(name)}", len(one.arm.outcomes)
        stats.record(ch, f"{key}/gap", one.gap)
        ch.record(f"{key}/gap-high", one.gap.high if math.isfinite(one.gap.high) else None, "nats")
        ch.record(f"{key}/p", one.p, n=n)
        ch.record(f"{key}/equivalent", one.equivalent, n=n)
        ch.record(f"{key}/lr", one.arm.run.lr)
        ch.record(f"{key}/lr-at-an-end", one.arm.at_an_end)
        ch.record(f"{key}/sent", one.sent, "bit")
        ch.record(f"{key}/drift", one.drift)


def slug(name: str) -> str:
    """A name of an arm as part of a key."""
    kept = "".join(c if c.isalnum() or c in ".-" else " " for c in name.replace("%", "pc").lower())
    return "-".join(kept.split())


def rows(judged: Mapping[str, Judged]) -> dict[str, dict[str, Any]]:
    """Of a table: what each arm sends, its rate, gap, and what the tests say."""
    return {
        name: {
            "bits sent": round(one.sent, 2),
            "fewer bytes": f"{32 / one.sent:.1f}×",
            "rate": f"{one.arm.run.lr:g}" + (" (end)" if one.arm.at_an_end else ""),
            "gap in nats": str(one),
            "p": f"{one.p:.2g}",
            f"within {one.margin:g}": "shown" if one.equivalent else "not shown",
        }
        for name, one in judged.items()
    }

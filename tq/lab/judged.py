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
    """An arm beside a baseline at the baseline's own rate, as a drop-in, and each at its own.

    Attributes:
        kept: the arm at the baseline's rate. own: at its own; what chose it stands there.
        gap: of ``kept`` to the baseline on the same fresh seeds, nats per token. own_gap: of ``own``.
        margin, p: of the two one-sided tests of ``gap``, by Holm over the arms that were judged together.
    """

    kept: Tuned
    own: Tuned
    gap: stats.Gap
    own_gap: stats.Gap
    margin: float
    p: float

    @property
    def equivalent(self) -> bool:
        return self.p < LEVEL

    @property
    def finite(self) -> bool:
        """Whether all runs stayed finite."""
        return math.isfinite(self.gap.mean) and math.isfinite(self.own_gap.mean)

    @property
    def sent(self) -> float | None:
        """Bits per element and step after the start in fp32, over those of an all-reduce that sends each twice; None
        for runs that send nothing."""
        run, outcome = self.kept.run, self.kept.outcomes[0]
        if "bits" not in outcome or run.workers == 1:
            return None
        share = run.warmup / run.steps
        return 32.0 if run.variant == "exact" else float((outcome["bits"] - 32 * share) / (1 - share))

    @property
    def drift(self) -> float | None:
        """Largest distance of replicas at the end of a run, relative to the length of the weights; None without any."""
        distances = [float(outcome.get("drift", 0.0)) for outcome in self.kept.outcomes]
        return max(distances) if self.kept.run.workers > 1 else None


def judge(
    kept: Mapping[str, Tuned], own: Mapping[str, Tuned], baseline: Tuned, margin: float
) -> dict[str, Judged]:
    """Every arm beside the baseline, whose fresh seeds are theirs; ``ValueError`` if not, or for another rate in
    ``kept``."""
    for name in kept:
        for arm in (kept[name], own[name]):
            if arm.run.seed != baseline.run.seed or len(arm.outcomes) != len(baseline.outcomes):
                raise ValueError(f"{name} has other seeds than the baseline")
        if kept[name].run.lr != baseline.run.lr:
            raise ValueError(f"{name} has the rate {kept[name].run.lr:g} and the baseline {baseline.run.lr:g}")
    adjusted = holm({name: equivalence(arm.losses, baseline.losses, margin).p for name, arm in kept.items()})

    def gap(arm: Tuned) -> stats.Gap:
        return stats.gap(arm.losses, baseline.losses)

    return {
        name: Judged(kept[name], own[name], gap(kept[name]), gap(own[name]), margin, adjusted[name]) for name in kept
    }


def record(ch: stats.Recorder, judged: Mapping[str, Judged], under: str = "") -> None:
    """Records of every arm, under its name: gap, gap-high, p, equivalent, own-gap, lr, lr-at-an-end, sent and drift."""
    for name, one in judged.items():
        key, n = f"{under}{slug(name)}", len(one.kept.outcomes)
        stats.record(ch, f"{key}/gap", one.gap)
        ch.record(f"{key}/gap-high", one.gap.high if math.isfinite(one.gap.high) else None, "nats")
        ch.record(f"{key}/p", one.p, n=n)
        ch.record(f"{key}/equivalent", one.equivalent, n=n)
        stats.record(ch, f"{key}/own-gap", one.own_gap)
        ch.record(f"{key}/lr", one.own.run.lr)
        ch.record(f"{key}/lr-at-an-end", one.own.at_an_end)
        if one.sent is not None:
            ch.record(f"{key}/sent", one.sent, "bit")
        if one.drift is not None:
            ch.record(f"{key}/drift", one.drift)


def said(gap: stats.Gap) -> str:
    """A gap with its half-width, or that a run was no longer finite."""
    return str(gap) if math.isfinite(gap.mean) else "not finite"


def slug(name: str) -> str:
    """A name of an arm as part of a key."""
    kept = "".join(c if c.isalnum() or c in ".-" else " " for c in name.replace("%", "pc").lower())
    return "-".join(kept.split())


def rows(judged: Mapping[str, Judged]) -> dict[str, dict[str, Any]]:
    """Of a table: what each arm sends, its gap at the baseline's rate, what the tests say, and its gap at its own."""
    table = {}
    for name, one in judged.items():
        bits = {} if one.sent is None else {"bits sent": f"{one.sent:.2f}", "fewer bytes": f"{32 / one.sent:.1f}×"}
        table[name] = bits | {
            "loss gap as a drop-in": said(one.gap),
            f"within {one.margin:g}": "shown" if one.equivalent else "not shown",
            "p": f"{one.p:.2g}",
            "own rate": f"{one.own.run.lr:g}" + (" (end)" if one.own.at_an_end else ""),
            "loss gap at its own rate": said(one.own_gap),
        }
    return table

"""Gaps of many arms in one figure: a row each, with its interval and the margin of equivalence behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tq.book.record import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tq.lab.judged import Judged
    from tq.lab.stats import Gap


def draw(ax: Axes, judged: Mapping[str, Judged], looks: Mapping[str, str], linear: float | None = None) -> None:
    """A row for every arm that stayed finite, in their order from above; filled where equivalence is shown.

    Where an arm's own rate is another than the baseline's, its gap there stands below, thin, with a cross.

    looks: names of ``figures.METHODS`` by arm; others are drawn as "tq". linear: the axis is linear up to here and
    logarithmic beyond, in nats; None: linear. The band is the margin.
    """
    shown = {name: one for name, one in judged.items() if one.finite}
    margins = {one.margin for one in shown.values()}
    for margin in margins:
        ax.axvspan(-margin, margin, color=figures.GRID, lw=0, zorder=0)
    for place, (name, one) in enumerate(shown.items()):
        look = figures.method(looks.get(name, "tq"))
        for gap, below, more in (
            (one.gap, 0.0, {"marker": "o", "markerfacecolor": look.colour if one.equivalent else figures.PAPER}),
            (one.own_gap, 0.3, {"marker": "x", "elinewidth": 0.8}),
        ):
            if below == 0 or one.own.run.lr != one.kept.run.lr:
                half = gap.half_width if gap.n > 1 else 0.0
                ax.errorbar(
                    gap.mean, place + below, xerr=half, color=look.colour, markersize=4.5, capsize=2, linestyle="",
                    **more,
                )  # fmt: skip
    ax.axvline(0, color=figures.SOFT, lw=0.8)
    labels = [name + (f", {32 / one.sent:.1f}×" if one.sent else "") for name, one in shown.items()]
    ax.set_yticks(range(len(shown)), labels)
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("held-out loss gap to fp32, nats per token")
    if linear is not None:
        ax.set_xscale("symlog", linthresh=linear)
        low, high = ax.get_xlim()
        powers = [power for power in (0.001, 0.01, 0.1, 1.0) if power >= linear]
        ticks = [t for t in (*(-p for p in powers), 0.0, *powers) if low <= t <= high]
        ax.set_xticks(sorted(ticks), [f"{t:g}" for t in sorted(ticks)])
        ax.minorticks_off()


def message(judged: Mapping[str, Judged], arms: str) -> str:
    """A figure's title: how many arms are shown to be equivalent to fp32. arms: what they are, in the plural."""
    shown, (margin,) = sum(one.equivalent for one in judged.values()), {one.margin for one in judged.values()}
    verb = "is" if shown == 1 else "are"
    return f"{shown} of {len(judged)} {arms} {verb} equivalent to fp32 within ±{margin:g} nats"


def rows(judged: Mapping[str, Judged]) -> dict[str, dict[str, str]]:
    """Of a table of arms: bits sent, gap at the baseline's learning rate, where it lies, and gap at an own rate.

    A gap is within the margin where the test shows it, outside where its whole 95 % interval is, else undecided.
    """

    def said(gap: Gap) -> str:
        return str(gap) if math.isfinite(gap.mean) else "not finite"

    found = {}
    for name, one in judged.items():
        sent = {} if one.sent is None else {"bits sent per element": f"{one.sent:.2f}"}
        end = ", end of the grid" if one.own.at_an_end else ""
        same = one.own.run.lr == one.kept.run.lr
        outside = not one.finite or abs(one.gap.mean) - one.gap.half_width > one.margin
        found[name] = sent | {
            "loss gap, nats": said(one.gap),
            f"margin ±{one.margin:g}": "within" if one.equivalent else "outside" if outside else "undecided",
            "at its own rate": f"the same{end}" if same else f"{said(one.own_gap)} at {one.own.run.lr:g}{end}",
        }
    return found

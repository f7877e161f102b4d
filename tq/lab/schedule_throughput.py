"""Published throughputs of pipeline schedules beside those that follow from simulated idle shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tq.systems import tables

COLUMNS = ("model", "p", "m", "zb_2p", "zb_1p", "1f1b", "interleaved")
#: Column of the published table -> schedule of ``tq.lab.schedule_rates.rates``, with as much memory.
SIMULATED = {"zb_1p": "zb_h1", "zb_2p": "search", "interleaved": "interleaved"}


class Ratio(NamedTuple):
    """Throughput over that of 1F1B. rounding: what the digits that are printed leave open, as a share."""

    simulated: float
    published: float
    rounding: float

    @property
    def over(self) -> float:
        """How much more was predicted than published, as a share."""
        return self.simulated / self.published - 1


def published() -> list[dict[str, str]]:
    """Rows of ``data/zero_bubble_throughput.csv``: samples per second and GPU."""
    return tables.read(tables.folder() / "zero_bubble_throughput.csv", COLUMNS)


def _rounding(said: str) -> float:
    """Half a unit of the last printed digit, as a share of the number."""
    return 0.5 * 10.0 ** -len(said.partition(".")[2]) / float(said)


def ratios(row: Mapping[str, str], idle: Mapping[str, float]) -> dict[str, Ratio]:
    """Of each schedule that is compared.

    Args:
        row: of ``published``.
        idle: share of a step in which the busiest rank waits, by schedule, simulated.

    Raises:
        KeyError: if a schedule of ``SIMULATED`` or 1F1B has no idle share.
    """
    return {
        name: Ratio(
            (1 - idle[ours]) / (1 - idle["1f1b"]), float(row[name]) / float(row["1f1b"]),
            _rounding(row[name]) + _rounding(row["1f1b"]),
        )
        for name, ours in SIMULATED.items()
    }  # fmt: skip


def compared(found: list[dict[str, Any]]) -> list[tuple[dict[str, str], dict[str, Ratio]]]:
    """(published row, its ratios) for outcomes of ``schedule_rates.rates``, by model and micro-batches."""
    rows = {(row["model"], row["m"]): row for row in published()}
    return [
        (row, ratios(row, {name: ours for name, (ours, _) in each["rates"].items()}))
        for each in found
        for row in [rows[each["model"], str(each["m"])]]
    ]

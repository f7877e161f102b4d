"""Published throughputs of pipeline schedules beside those that follow from simulated idle shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tq.systems import tables
from tq.systems.schedules import Cost, interleaved, one_f_one_b, simulate

COLUMNS = ("model", "p", "m", "zb_2p", "zb_1p", "1f1b", "interleaved")
#: Column of the published table -> schedule of ``tq.lab.schedule_rates.rates``, with as much memory.
SIMULATED = {"zb_1p": "zb_h1", "zb_2p": "search", "interleaved": "interleaved"}
_TIMES = ("forward", "input", "weight", "transfer")  # of a pass, in the table of bubble rates


class Ratio(NamedTuple):
    """Throughput over that of 1F1B. rounding: what the digits that are printed leave open, as a share."""

    simulated: float
    published: float
    rounding: float

    @property
    def off(self) -> float:
        """How far the published one lies above the simulated one, as a share of this."""
        return self.published / self.simulated - 1

    @property
    def kept(self) -> float:
        """The published gain over 1F1B, as a share of the simulated one."""
        return (self.published - 1) / (self.simulated - 1)


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


def chunked(row: Mapping[str, str], each_ms: float) -> float:
    """Simulated throughput of interleaved 1F1B over that of 1F1B, if a pass lasts ``each_ms`` beside what its share of
    the layers takes.

    The published time of a whole stage's pass holds that once; a chunk's is its share of the rest, and it again.

    Args:
        row: of ``schedule_rates.published``.
        each_ms: milliseconds, the row's unit of time.
    """
    return _whole(row) / _in_chunks(row, each_ms)


def _whole(row: Mapping[str, str]) -> float:
    times = (float(row[f"t_{kind}"]) for kind in _TIMES)
    return simulate(one_f_one_b(int(row["p"]), int(row["m"])), Cost(*times)).span


def _in_chunks(row: Mapping[str, str], each_ms: float) -> float:
    v = int(row["chunks"])
    forward, inputs, weights, transfer = (float(row[f"t_{kind}"]) for kind in _TIMES)
    passes = Cost((forward - each_ms) / v + each_ms, (inputs - each_ms) / v + each_ms, weights / v, transfer)
    return simulate(interleaved(int(row["p"]), int(row["m"]), v), passes).span


def chunk_cost(row: Mapping[str, str], ratio: float) -> float:
    """Milliseconds per pass with which ``chunked`` gives this ratio; 0 where it is never so fast."""
    wanted = _whole(row) / ratio
    before, cost = 0.0, 0.5
    had, has = (_in_chunks(row, each) for each in (before, cost))
    if had >= wanted:
        return 0.0
    for _ in range(20):  # the span is nearly a line, so that secants end soon
        if abs(has / wanted - 1) < 1e-9 or has == had:
            break
        before, cost, had = cost, cost + (wanted - has) * (cost - before) / (has - had), has
        has = _in_chunks(row, cost)
    return cost


def reversed_rows(rows: list[dict[str, Ratio]], first: str, second: str) -> tuple[int, int]:
    """(rows in which ``first`` is simulated faster than ``second``, those of them in which it is published slower)."""
    ahead = [row for row in rows if row[first].simulated > row[second].simulated]
    return len(ahead), sum(row[first].published < row[second].published for row in ahead)


def compared(found: list[dict[str, Any]]) -> list[tuple[dict[str, str], dict[str, Ratio]]]:
    """(published row, its ratios) for outcomes of ``schedule_rates.rates``, by model and micro-batches."""
    rows = {(row["model"], row["m"]): row for row in published()}
    return [
        (row, ratios(row, {name: ours for name, (ours, _) in each["rates"].items()}))
        for each in found
        for row in [rows[each["model"], str(each["m"])]]
    ]

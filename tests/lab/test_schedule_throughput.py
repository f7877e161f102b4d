"""Ratios of throughput follow from idle shares, and the published ones from the printed digits."""

from __future__ import annotations

import pytest

from tq.lab import schedule_rates, schedule_throughput
from tq.lab.schedule_throughput import Ratio, chunk_cost, chunked, compared, published, ratios, reversed_rows

ROW = {"model": "x", "p": "4", "m": "8", "zb_2p": "3.0", "zb_1p": "2.50", "1f1b": "2.0", "interleaved": "2.0"}
IDLE = {"1f1b": 0.5, "zb_h1": 0.4, "search": 0.25, "interleaved": 0.0}


def test_half_as_idle_is_faster_by_what_is_worked() -> None:
    found = ratios(ROW, IDLE)
    assert found["zb_1p"].simulated == pytest.approx(1.2) and found["zb_1p"].published == 1.25
    assert found["zb_2p"].off == pytest.approx(0.0) and found["interleaved"].off == pytest.approx(-0.5)
    assert found["zb_1p"].kept == pytest.approx(1.25) and found["interleaved"].kept == 0.0
    assert found["zb_1p"].rounding == pytest.approx(0.005 / 2.5 + 0.05 / 2.0)


def test_a_schedule_without_an_idle_share_is_missed() -> None:
    with pytest.raises(KeyError, match="search"):
        ratios(ROW, {name: idle for name, idle in IDLE.items() if name != "search"})


def test_every_published_throughput_has_published_times() -> None:
    pairs = [(row["model"], row["p"], row["m"]) for row in published()]
    assert pairs == [(row["model"], row["p"], row["m"]) for row in schedule_rates.published()] and len(pairs) == 12
    for row in published():
        rate = {name: float(row[name]) for name in ("1f1b", "zb_1p", "zb_2p", "interleaved")}
        assert rate["1f1b"] < rate["interleaved"] and rate["1f1b"] < rate["zb_1p"] < rate["zb_2p"]


def test_rows_are_found_by_model_and_micro_batches() -> None:
    outcome = schedule_rates.rates({"row": 3})
    ((row, found),) = compared([outcome])
    assert (row["model"], row["m"], row["zb_2p"]) == ("6.2B", "24", "4.32")
    assert found["zb_2p"].published == 4.32 / 3.5 and set(found) == set(schedule_throughput.SIMULATED)


def test_a_ranking_is_reversed_where_the_published_one_is_the_other_way_round() -> None:
    def row(*pairs: tuple[float, float]) -> dict[str, Ratio]:
        return {name: Ratio(*pair, 0.0) for name, pair in zip("ab", pairs, strict=True)}

    rows = [row((1.2, 1.1), (1.1, 1.2)), row((1.2, 1.2), (1.1, 1.1)), row((1.0, 1.0), (1.1, 1.2))]
    assert reversed_rows(rows, "a", "b") == (2, 1) and reversed_rows(rows, "b", "a") == (1, 0)


def test_a_chunk_costs_what_its_throughput_lacks() -> None:
    row = schedule_rates.published()[3]
    outcome = schedule_rates.rates({"row": 3})["rates"]
    free = (1 - outcome["interleaved"][0]) / (1 - outcome["1f1b"][0])
    assert chunked(row, 0.0) == pytest.approx(free, rel=1e-9)
    assert chunk_cost(row, chunked(row, 0.6)) == pytest.approx(0.6, abs=1e-6)
    assert chunk_cost(row, free + 0.1) == 0.0 and chunked(row, 0.6) < free

"""The whitepaper's dollars: its figures are read from the ledger, and what they imply is computed twice."""

from __future__ import annotations

import csv
import re

import pytest

from tq.economics import breakeven, prices
from tq.economics import whitepaper as wp
from tq.systems import tables

with open(tables.folder() / "claims.csv", encoding="utf-8", newline="") as file:
    CLAIMS = {row["id"]: row for row in csv.DictReader(file)}


def numbers(text: str) -> list[float]:
    """500K-4.6M -> [500000, 4600000]"""
    scale = {"": 1.0, "K": 1e3, "M": 1e6}
    return [float(n.replace(",", "")) * scale[s] for n, s in re.findall(r"(\d[\d,]*(?:\.\d+)?)\s?([KM]?)", text)]


@pytest.mark.parametrize("row", wp.cost_rows().values(), ids=lambda row: row.scale)
def test_the_table_is_that_of_the_ledger(row: wp.CostRow) -> None:
    cost, configuration = (CLAIMS[claim] for claim in row.claims)
    assert row.scale in cost["claim"] or row.scale in cost["claim"].lower()
    assert numbers(cost["value"]) == list(row.usd)
    gpus, duration = configuration["value"].rsplit(",", 1)
    low, high = numbers(duration)
    counts = numbers(re.sub(r"[HA]\d+", "", gpus))
    hours = {"weeks": 168.0, "months": 730.0}[configuration["unit"]]
    assert row.gpu_hours == (min(counts) * low * hours, max(counts) * high * hours)


def test_constants_are_those_of_the_ledger() -> None:
    assert [share * 100 for share in wp.SAVINGS] == pytest.approx(numbers(CLAIMS["S0-007"]["value"]))
    assert [share * 100 for share in wp.SHARES] == pytest.approx(numbers(CLAIMS["S0-013"]["value"]))
    assert numbers(CLAIMS["S0-001"]["value"]) == [wp.RATIO]
    assert numbers(CLAIMS["S0-020"]["value"])[0] == wp.BASE_USD_PER_GPU_HOUR


def test_the_claimed_dollars_come_out_of_the_inferred_base() -> None:
    claimed = numbers(CLAIMS["S0-008"]["value"])
    assert list(wp.saved_usd()) == pytest.approx(claimed, rel=0.01)
    assert wp.base_usd() < wp.cost_rows()["70B"].usd[0]  # and yet its own table says more


def test_implied_prices_lie_within_every_reading() -> None:
    for row in wp.cost_rows().values():
        low, high = row.implied_usd_per_gpu_hour
        widest = row.widest_usd_per_gpu_hour
        readings = [usd / hours for usd in row.usd for hours in row.gpu_hours]
        assert widest == (min(readings), max(readings)) and low in readings and high in readings
        assert row.usd_at(low, high) == pytest.approx(row.usd)


def test_which_rows_a_listed_price_can_pay() -> None:
    """Whether the implied price lies in the range of today's list prices; the verdict is the ledger's."""
    book = prices.load()
    cheapest = min(p.usd_per_gpu_hour for p in book.prices if p.gpu == "h100-80gb")
    assert wp.cost_rows()["175B"].implied_usd_per_gpu_hour[1] < cheapest
    assert wp.cost_rows()["175B"].widest_usd_per_gpu_hour[1] > cheapest  # 1,000 GPUs, 2 months, $4.6M
    assert wp.cost_rows()["7B"].implied_usd_per_gpu_hour[1] > cheapest


@pytest.mark.parametrize("ratio", [wp.RATIO, float(breakeven.ratio()), float(breakeven.ratio(base_bits=16))])
def test_shares_and_overheads_solve_amdahl(ratio: float) -> None:
    for wanted, f in zip(wp.SAVINGS, wp.shares_needed(ratio), strict=True):
        assert f * (1 - 1 / ratio) == pytest.approx(wanted)
    for f, k, saved in zip(wp.SHARES, wp.breakeven_overheads(ratio), wp.savings_at_claimed_shares(ratio), strict=True):
        assert (1 - f) * k + f / ratio == pytest.approx(1)
        assert saved == pytest.approx(f - f / ratio)
    for wanted, saved, further in zip(
        wp.SAVINGS, wp.savings_at_claimed_shares(ratio), wp.further_time_cut(ratio), strict=True
    ):
        assert (1 - saved) * (1 - further) == pytest.approx(1 - wanted)


def test_interconnect_scales_with_the_chip() -> None:
    assert wp.interconnect_usd_per_gpu(44, 0.44, 0.17) == pytest.approx(17)
    with pytest.raises(ValueError, match="chip_usd must be positive"):
        wp.interconnect_usd_per_gpu(-1)


def test_network_money_and_power_are_shares_of_the_whole() -> None:
    assert numbers(CLAIMS["S0-016"]["value"])[0] * 1e6 / 1000 == wp.NETWORK_SAVED_USD_PER_GPU
    assert wp.cluster_share(16_000) == 0.5
    low, high = wp.power_cut_without_network()
    claimed_low = numbers(CLAIMS["S0-055"]["value"])[0] / 100
    assert 0 < low < high < claimed_low  # all of the network is less than what leaving InfiniBand is said to save

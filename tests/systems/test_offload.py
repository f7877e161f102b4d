"""Bytes that move, seconds that they take, and the steps that are long enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tq.systems import offload
from tq.systems.offload import PLANS, Place, Plan, moving_s, place, slowdown, streamed, tokens_for, update_s

DISK = Place("disk", 2e9, 1e9, False)
LINK = Place("link", 2e9, 1e9, True)
BOTH = Place("disk that does both", 2e9, 1e9, False, both_bytes_per_s=0.8e9)
MEMORY = Place("memory of the same CPU", 2e9, 1e9, False, beside=False)


def test_directions_add_up_unless_they_go_at_the_same_time() -> None:
    plan = Plan(8.0, 8.0, 8.0, 8.0)
    assert moving_s(1e9, plan, DISK) == pytest.approx(4 + 8)
    assert moving_s(1e9, plan, LINK) == pytest.approx(8)


def test_every_plan_keeps_all_of_a_parameter_somewhere() -> None:
    for plan in PLANS.values():
        assert plan.device + plan.away == 16
    there = PLANS["ZeRO-Offload"]
    assert moving_s(1e9, there, LINK, 28e9) == pytest.approx(moving_s(1e9, there, LINK) + 1.0)
    coded = streamed(1.547)
    assert coded.device == 8 and coded.read == coded.written == coded.away == 1.547


def test_the_ledgers_sum_for_nvme() -> None:
    """24 bytes a parameter at 5 GB/s beside 6 FLOPs a token at 80 TFLOP/s: 49 % at 131,072 tokens."""
    nvme = Place("nvme", 5e9, 5e9, False)
    assert slowdown(2**17, Plan(4.0, 12.0, 12.0, 12.0), nvme, 80e12) == pytest.approx(0.488, abs=1e-3)


def test_the_slowdown_falls_with_the_tokens_and_is_reached_where_it_says() -> None:
    fp32 = PLANS["moments streamed, fp32"]
    tokens = tokens_for(0.3, fp32, DISK, 1e14)
    assert slowdown(tokens, fp32, DISK, 1e14) == pytest.approx(0.3)
    assert slowdown(2 * tokens, fp32, DISK, 1e14) == pytest.approx(0.15)
    ratio = tokens / tokens_for(0.3, streamed(1.6), DISK, 1e14)
    assert ratio == pytest.approx(5)
    assert np.all(np.diff(slowdown(np.array([1e3, 1e4, 1e5]), fp32, DISK, 1e14)) < 0)


def test_both_directions_at_once_take_what_was_measured() -> None:
    assert BOTH.seconds(3e9, 0) == 1.5 and BOTH.seconds(0, 3e9) == 3.0
    assert BOTH.seconds(8e8, 8e8) == pytest.approx(1.0)
    assert BOTH.seconds(2.8e9, 8e8) == pytest.approx(1.0 + 2e9 / 2e9)
    full = Place("full rate both ways", 1e9, 1e9, False, both_bytes_per_s=1e9)
    assert full.seconds(3e9, 2e9) == Place("duplex", 1e9, 1e9, True).seconds(3e9, 2e9)


def test_where_the_processor_copies_nothing_hides() -> None:
    plan = streamed(8.0)
    assert update_s(1e8, plan, MEMORY, 0.5, 100) == pytest.approx(0.5 + moving_s(1e8, plan, MEMORY))
    assert update_s(1e8, plan, MEMORY, 0.5, 1) == update_s(1e8, plan, DISK, 0.5, 1)


@pytest.mark.parametrize("where", [DISK, LINK, BOTH])
def test_an_update_hides_the_shorter_part(where: Place) -> None:
    plan = streamed(8.0)
    moving, first_and_last = moving_s(1e8, plan, where), 1e8 * 8 / 100 * (1 / 2e9 + 1 / 1e9)
    quick = update_s(1e8, plan, where, 0.0, 100)
    slow = update_s(1e8, plan, where, 10 * moving, 100)
    assert moving <= quick <= moving + first_and_last
    assert slow == pytest.approx(10 * moving + first_and_last)
    alone = update_s(1e8, plan, where, 0.5, 1)  # one bucket: nothing overlaps
    assert alone == pytest.approx(0.5 + 1e8 * 8 * (1 / 2e9 + 1 / 1e9))


def test_the_table_has_rates_with_sources() -> None:
    assert {"pcie4-x16", "pcie5-x16", "nvme-gen4", "sata-ssd"} <= set(offload.places())
    assert place("pcie5-x16").read_bytes_per_s == 2 * place("pcie4-x16").read_bytes_per_s and place("pcie4-x16").duplex
    assert not place("nvme-gen4").duplex
    with pytest.raises(ValueError, match="place must be one of pcie4-x16"):
        place("tape")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("x,read,1,GB/s,,2026,assumed,", "source and date"),
        ("x,read,1,MB/s,s,2026,assumed,", "unit of read"),
        ("x,read,1,GB/s,s,2026,assumed,", "x lacks duplex, write"),
        ("x,read,fast,GB/s,s,2026,assumed,", "finite number"),
    ],
)
def test_a_damaged_table_is_named(changed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hardware.csv").write_text("")
    (tmp_path / "data" / "stores.csv").write_text(f"{','.join(offload.COLUMNS)}\n{changed}\n")
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    offload._table.cache_clear()
    try:
        with pytest.raises(ValueError, match=message):
            offload.places()
    finally:
        monkeypatch.undo()
        offload._table.cache_clear()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Place("x", 0.0, 1.0, True), lambda: Place("x", 1.0, 1.0, True, both_bytes_per_s=0.0),
        lambda: Plan(-1.0, 0.0, 0.0, 0.0), lambda: streamed(0.0),
        lambda: slowdown(0, streamed(8.0), DISK, 1e14), lambda: tokens_for(-1.0, streamed(8.0), DISK, 1e14),
        lambda: update_s(1e6, PLANS["ZeRO-Offload"], DISK, 1.0, 0), lambda: DISK.seconds(-1, 0),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(call) -> None:
    with pytest.raises(ValueError, match="must be"):
        call()

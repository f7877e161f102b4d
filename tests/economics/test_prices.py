"""Prices: the file keeps its schema, faults are named with their row, stale prices say so, snapshots are taken in."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.economics import prices
from tq.systems import hardware, tables

HEADER = ",".join(prices.COLUMNS)
ROW = "aws,h100-80gb,on-demand,6.88,2026-11-09,400,a list,read in source,"
DAY = datetime.date(2026, 11, 9)


def file(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "p.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_the_file_of_the_repository_is_sound() -> None:
    assert prices.check(tables.folder() / "prices.csv") == []
    book = prices.load()
    assert set(book.gpus) <= set(hardware.gpus())
    assert {price.kind for price in book.prices} == set(prices.KINDS)
    assert all(price.source and price.date <= book.newest for price in book.prices)


def test_prices_per_gpu_agree_with_their_notes() -> None:
    """Where the note gives the price of a node of 8, an eighth of it is the price."""
    for price in prices.load().prices:
        words = price.note.replace(",", "").split()
        if "hour" in words and "8" in words:
            node = next(float(word) for word in words if word.replace(".", "", 1).isdigit() and float(word) > 9)
            assert price.usd_per_gpu_hour == pytest.approx(node / 8, abs=5e-5), price


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW.replace("6.88", "-1"), "usd_per_gpu_hour must be a positive number, got '-1'"),
        (ROW.replace("6.88", "nan"), "usd_per_gpu_hour"),
        (ROW.replace("6.88", "inf"), "usd_per_gpu_hour"),
        (ROW.replace("6.88", ""), "usd_per_gpu_hour"),
        (ROW.replace("2026-11-09", "9 Nov 2026"), "date must be a day"),
        (ROW.replace("on-demand", "cheap"), "kind must be one of on-demand, spot, reserved"),
        (ROW.replace("read in source", "surely"), "checked must be one of"),
        (ROW.replace("h100-80gb", "H100 80GB"), "gpu must be a lower-case name"),
        (ROW.replace("a list", " "), "source must not be empty"),
        (ROW.replace(",400,", ",fast,"), "network_gbit_per_gpu"),
        (ROW + ",more", "fields are expected"),
    ],
)
def test_a_fault_is_named_with_its_row(tmp_path: Path, row: str, words: str) -> None:
    path = file(tmp_path, ROW.replace("aws", "azure"), row)
    (problem,) = prices.check(path)
    assert words in problem and "row 3" in problem and "p.csv" in problem
    with pytest.raises(ValueError, match="p.csv, row 3"):
        prices.load(path)


def test_all_faults_are_listed_and_repeats_found(tmp_path: Path) -> None:
    path = file(tmp_path, ROW, ROW, ROW.replace("6.88", "0"))
    problems = prices.check(path)
    assert len(problems) == 2 and "repeats row 2" in problems[0] and "row 4" in problems[1]
    with pytest.raises(ValueError, match="and 1 more"):
        prices.load(path)


def test_other_columns_a_missing_and_an_empty_file(tmp_path: Path) -> None:
    assert "has columns" in prices.check(file(tmp_path, ROW, header=HEADER.replace("date", "day")))[0]
    assert "No such file" in prices.check(tmp_path / "none.csv")[0]
    assert "holds no price" in prices.check(file(tmp_path))[0]


def test_stale_prices_answer_with_a_warning_and_the_way_out(tmp_path: Path) -> None:
    book = prices.load(file(tmp_path, ROW))
    assert book.find("h100-80gb", as_of=DAY + datetime.timedelta(180))[0].usd_per_gpu_hour == 6.88
    with pytest.warns(prices.StalePrices, match="181 days before 2027-05-09.*--import FILE.*--max-age-days"):
        assert book.find("h100-80gb", as_of=DAY + datetime.timedelta(181))[0].usd_per_gpu_hour == 6.88
    assert book.find("h100-80gb", as_of=DAY + datetime.timedelta(181), max_age_days=181)


def test_a_stale_provider_is_left_out_beside_a_fresh_one(tmp_path: Path) -> None:
    old = ROW.replace("aws", "azure").replace("2026-11-09", "2025-01-01")
    found = prices.load(file(tmp_path, ROW, old)).find("h100-80gb", as_of=DAY)
    assert [price.provider for price in found] == ["aws"]


def test_the_days_of_prices_are_the_first_and_the_last(tmp_path: Path) -> None:
    later = ROW.replace("aws", "azure").replace("2026-11-09", "2026-12-01")
    assert prices.days(prices.load(file(tmp_path, ROW, later)).prices) == (DAY, datetime.date(2026, 12, 1))


def test_prices_of_the_future_and_replaced_ones_do_not_count(tmp_path: Path) -> None:
    later = ROW.replace("6.88", "5").replace("2026-11-09", "2026-12-01")
    book = prices.load(file(tmp_path, ROW, later))
    assert book.spread("h100-80gb", as_of=DAY).mid == 6.88
    assert book.spread("h100-80gb", as_of=datetime.date(2026, 12, 2)).mid == 5
    with pytest.raises(ValueError, match="on or before 2026-01-01"):
        book.find("h100-80gb", as_of=datetime.date(2026, 1, 1))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpu": "h300"}, "gpu='h300'.*accepted are"),
        ({"gpu": "h100-80gb", "kind": "free"}, "kind='free'"),
        ({"gpu": "h100-80gb", "provider": "nobody"}, "provider='nobody'"),
        ({"gpu": "h100-80gb", "kind": "spot"}, "has no spot prices of h100-80gb"),
        ({"gpu": "h100-80gb", "max_age_days": -1}, "max_age_days must be 0 or more"),
    ],
)
def test_what_there_is_not_is_said(tmp_path: Path, asked: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prices.load(file(tmp_path, ROW)).find(**asked, as_of=DAY)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_spread_holds_every_price(values: list[float]) -> None:
    rows = tuple(
        prices.Price(f"p{i}", "h100-80gb", "spot", value, DAY, None, "s", "not found") for i, value in enumerate(values)
    )
    spread = prices.PriceBook(rows, Path("x")).spread("h100-80gb", "spot", as_of=DAY)
    assert spread.low == min(values) and spread.high == max(values) and spread.low <= spread.mid <= spread.high


def test_a_snapshot_is_taken_in_once_and_keeps_the_history(tmp_path: Path) -> None:
    book = file(tmp_path, ROW)
    new = tmp_path / "new.csv"
    new.write_text(f"{HEADER}\n{ROW.replace('6.88', '5.5').replace('2026-11-09', '2027-02-01')}\n", encoding="utf-8")
    assert prices.take_in(new, book) == 1
    assert [price.usd_per_gpu_hour for price in prices.load(book).prices] == [6.88, 5.5]
    before = book.read_bytes()
    assert prices.take_in(new, book) == 0 and book.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted([book, new])


def test_the_file_of_the_repository_survives_being_written(tmp_path: Path) -> None:
    ours = tables.folder() / "prices.csv"
    copy = tmp_path / "prices.csv"
    copy.write_bytes(ours.read_bytes())
    assert prices.take_in(ours, copy) == 0
    assert prices.load(copy).prices == prices.load().prices


def test_a_bad_snapshot_changes_nothing(tmp_path: Path) -> None:
    book = file(tmp_path, ROW)
    bad = tmp_path / "bad.csv"
    bad.write_text(f"{HEADER}\n{ROW.replace('6.88', '-5')}\n", encoding="utf-8")
    before = book.read_bytes()
    with pytest.raises(ValueError, match="bad.csv, row 2"):
        prices.take_in(bad, book)
    assert book.read_bytes() == before


def test_storage(tmp_path: Path) -> None:
    found = prices.storage()
    assert [p.usd_per_gb_month for p in found] == sorted(p.usd_per_gb_month for p in found)
    header = ",".join(prices.STORAGE_COLUMNS)
    with pytest.raises(ValueError, match="row 2: usd_per_gb_month"):
        prices.storage(file(tmp_path, "x,ssd,free,2026-01-01,s,not found,", header=header))

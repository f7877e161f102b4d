"""A drive held to a rate: transfers take what it says, one after the other, and change nothing."""

from __future__ import annotations

import threading
import time

import pytest

from tq.lab import slow_drive


def test_transfers_of_all_threads_share_the_rate() -> None:
    drive, began = slow_drive.Drive(1e6), time.perf_counter()
    threads = [threading.Thread(target=drive.serve, args=(began, 50_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.2 <= time.perf_counter() - began < 1


def test_a_drive_that_rested_has_saved_nothing_up() -> None:
    drive = slow_drive.Drive(1e6)
    drive.serve(time.perf_counter(), 1000)
    time.sleep(0.05)
    began = time.perf_counter()
    drive.serve(began, 20_000)
    assert 0.02 <= time.perf_counter() - began < 0.5


def test_time_that_the_transfer_itself_took_counts() -> None:
    drive, now = slow_drive.Drive(1e6), time.perf_counter()
    drive.serve(now - 1, 500_000)
    assert time.perf_counter() - now < 0.4


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be positive"):
        slow_drive.Drive(rate)


def test_a_slow_drive_makes_the_step_as_long_as_its_bytes_and_no_loss_changes() -> None:
    task = slow_drive.pairs(True, 20e6)[1]
    task["run"] |= dict(hidden=64, seq=16, layers=2, steps=8, impl="reference")
    slow, free = slow_drive.paired(task), slow_drive.paired(task | {"rate": None})
    for side in ("fp32", "codes"):
        assert slow[f"{side}_losses"] == free[f"{side}_losses"] and len(slow[f"{side}_losses"]) == 8
        assert slow[f"{side}_s"] > free[f"{side}_s"]
    assert slow["fp32_s"] > 1.3 * slow["codes_s"]
    layer = 12 * 64**2  # weights of a block, at least: read and written with both moments in each step
    assert slow["fp32_s"] > 2 * layer * 24 / 20e6

"""Rates of failure: Llama 3's count comes back, and simulated clusters fail as often."""

from pathlib import Path

import numpy as np
import pytest

from tq.systems import failures, tables


def test_llama_3_comes_back() -> None:
    # table 5: 419 unexpected interruptions of 16,384 GPUs in 54 days
    assert failures.failures_in(54 * failures.DAY_S, 16_384) == pytest.approx(419, rel=1e-4)
    assert failures.mtbf_s(16_384) / 3600 == pytest.approx(3.09, abs=0.005)
    assert failures.failures_in(failures.DAY_S, 25_000) == pytest.approx(11.8, abs=0.05)


def test_gpus_that_fail_independently_fail_so_as_a_cluster() -> None:
    first = np.random.default_rng(3).exponential(1_000.0, (4_000, 50)).min(axis=1)  # hours to the first of 50
    assert first.mean() * 3600 == pytest.approx(failures.mtbf_s(50, 1_000.0), rel=0.05)
    assert (first > 10).mean() == pytest.approx(failures.survival(36_000.0, 50, 1_000.0), abs=0.02)


def test_goodput() -> None:
    assert failures.goodput(0.1) == pytest.approx(0.9) and failures.goodput(1.5) == 0


def test_the_table_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "gpu_hours_per_interruption,50677,GPU h,a source,2024,read in source,\n"
    monkeypatch.setattr(tables, "folder", lambda: tmp_path)
    for text, message in (
        (row.replace("50677", "many"), "value must be a finite number, got 'many'"),
        (row.replace("a source", ""), "row 2: source, date and one of"),
        (row * 2, "row 3: gpu_hours_per_interruption stands there twice"),
        ("", "has no gpu_hours_per_interruption"),
    ):
        failures._table.cache_clear()
        (tmp_path / "reliability.csv").write_text(",".join(failures.COLUMNS) + "\n" + text)
        with pytest.raises(ValueError, match=message):
            failures.mtbf_s(8)
    failures._table.cache_clear()
    with pytest.raises(ValueError, match="gpus must be positive, got 0"):
        failures.mtbf_s(0, 1_000.0)

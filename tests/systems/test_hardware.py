"""The hardware table: its schema, its units, and clusters with defaults and overrides."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.systems import Cluster, hardware, tables
from tq.systems.arguments import positive

DATA = tables.folder() / "hardware.csv"


@pytest.fixture
def table_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Reads the table after a change to its text."""

    def read(old: str, new: str) -> None:
        text = DATA.read_text(encoding="utf-8")
        assert old in text
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "hardware.csv").write_text(text.replace(old, new, 1), encoding="utf-8")
        monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
        hardware._table.cache_clear()
        try:
            hardware._table()
        finally:
            hardware._table.cache_clear()

    return read


def test_every_gpu_of_the_published_runs_is_known() -> None:
    from tq.systems.validation import published

    assert {row["gpu_type"] for row in published()} - {""} <= set(hardware.gpus())


@given(st.sampled_from(hardware.gpus()))
def test_units_round_trip(name: str) -> None:
    spec, row = hardware.gpu(name), hardware._table()["gpu"][name]
    assert spec.peak_flops / 1e12 == pytest.approx(row["peak_bf16"])
    assert spec.nvlink_bytes_per_s * 2 / 1e9 == pytest.approx(row["nvlink"])
    assert spec.nic_bytes_per_s * 8 / 1e9 == pytest.approx(row["nic"])
    assert spec.memory_bytes / 2**30 == pytest.approx(row["memory"])


@given(st.floats(1e-3, 1e4))
def test_gigabits_are_an_eighth_in_bytes(rate: float) -> None:
    assert hardware.gbit(rate) * 8 / 1e9 == pytest.approx(rate)


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="a100-80gb, h100-80gb.*got 'a100'"):
        Cluster("a100", 8)
    with pytest.raises(ValueError, match="ib-ndr.*got 'carrier-pigeon'"):
        Cluster("a100-80gb", 8, network="carrier-pigeon")


def test_a_tier_replaces_the_port_of_the_node() -> None:
    port, tier = Cluster("h100-80gb", 8), Cluster("h100-80gb", 8, network="eth-25g")
    assert port.inter_bytes_per_s == 50e9 and tier.inter_bytes_per_s == 25e9 / 8
    assert Cluster("h100-80gb", 8, network="eth-25g", inter_bytes_per_s=1e9).inter_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 0}, "gpus must be an int of at least 1, got 0"),
        ({"inter_bytes_per_s": -1.0}, "inter_bytes_per_s must be positive, got -1.0"),
        ({"peak_flops": float("nan")}, "peak_flops must be positive, got nan"),
        ({"inter_bytes_per_s": np.array([1e9, 0.0])}, "inter_bytes_per_s must be positive, got 0.0"),
        ({"node_gpus": 0}, "node_gpus must be an int of at least 1, got 0"),
    ],
)
def test_bad_clusters_raise_one_clear_message(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Cluster(**{"gpu": "a100-80gb", "gpus": 8, **arguments})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_number_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="tokens must be a number"):
        positive("tokens", "many")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("312,TFLOP/s", "312,GFLOP/s", "unit of peak_bf16 must be one of TFLOP/s; got 'GFLOP/s'"),
        ("peak_bf16,312", "peak_bf16,-312", "value must be positive, got -312"),
        ("peak_bf16,312", "peak_bf16,many", "value must be a finite number, got 'many'"),
        ("gpu,a100-40gb,memory", "gpu,a100-40gb,peak_bf16", "unit of peak_bf16 must be one of TFLOP/s; got 'GiB'"),
        ("NVIDIA A100 Tensor Core GPU datasheet", "", "source and date must not be empty"),
        ("kind,name", "kind,title", "hardware.csv has columns"),
        ("gpu,a100-40gb", "chip,a100-40gb", "kind must be one of gpu, link; got 'chip'"),
        ('"transcribed, not re-read"', "sure", "checked must be one of"),
    ],
)
def test_a_damaged_table_is_refused(table_of, old: str, new: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as caught:
        table_of(old, new)
    assert message in str(caught.value)


def test_a_quantity_that_is_missing_is_named(table_of) -> None:  # type: ignore[no-untyped-def]
    line = next(row for row in DATA.read_text().splitlines(True) if row.startswith("gpu,a100-40gb,tdp"))
    with pytest.raises(ValueError, match="a100-40gb lacks tdp"):
        table_of(line, "")

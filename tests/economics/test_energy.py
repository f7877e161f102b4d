"""Energy: only metered totals check it; power and carbon come from the tables; bad factors are refused."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.economics import energy
from tq.economics.prices import CHECKED
from tq.systems import hardware, tables

METERED = [total for total in energy.published() if total.basis == "metered"]
KNOWN = [gpu for gpu, power in energy.powers().items() if power.node_max_w is not None]


@pytest.mark.parametrize("total", [total for total in METERED if total.gpu_hours], ids=lambda total: total.id)
def test_bookkeeping_agrees_with_the_meter(total: energy.Metered) -> None:
    assert abs(energy.check_metered(total.id).error) < 0.01


@pytest.mark.parametrize("total", [t for t in energy.published() if t.basis != "metered"], ids=lambda total: total.id)
def test_what_was_not_metered_validates_nothing(total: energy.Metered) -> None:
    with pytest.raises(ValueError, match=f"{total.id}.*was not metered"):
        energy.check_metered(total.id, total.mwh)


@pytest.mark.parametrize("total", [t for t in energy.published() if t.basis == "tdp"], ids=lambda total: total.id)
def test_the_circular_totals_are_hours_times_tdp(total: energy.Metered) -> None:
    """Why they are refused: the published figure is the product of its own assumptions."""
    assert total.gpu_hours is not None
    assert total.gpu_hours * hardware.gpu(total.gpu).tdp_w * total.pue / 1e6 == pytest.approx(total.mwh, rel=2e-3)


def test_totals_are_those_of_the_published_runs() -> None:
    with open(tables.folder() / "published_runs.csv", encoding="utf-8", newline="") as file:
        runs = {row["id"]: row for row in csv.DictReader(file)}
    shared = [total for total in energy.published() if total.id in runs]
    assert len(shared) >= 5
    for total in shared:
        assert float(runs[total.id]["published_value"]) == total.mwh and runs[total.id]["unit"] == "MWh"


def test_the_olmo_run_lies_within_the_model() -> None:
    """GPUs alone, from FLOPs at the MFU of whole runs (14-51 % in `data/published_runs.csv`): brackets the meter."""
    flops, tdp, peak = 6 * 7.2986e9 * 4.05e12, hardware.gpu("h100-80gb").tdp_w, hardware.gpu("h100-80gb").peak_flops
    fast, slow = (
        energy.check_metered("OLMo2-7B", flops / (mfu * peak) / 3600 * tdp * load / 1e6)
        for mfu, load in ((0.51, 0.637), (0.14, 0.824))
    )
    assert fast.error < 0 < slow.error


@pytest.mark.parametrize("gpu", KNOWN)
def test_power_lies_between_the_gpus_and_the_rating(gpu: str) -> None:
    power, watts = energy.power(gpu), energy.gpu_interval_w(gpu)
    assert power.rated_w > hardware.gpu(gpu).tdp_w
    assert watts.low < watts.mid < watts.high
    assert watts.high == pytest.approx(power.rated_w * 0.824 * 1.06 * 1.2)


def test_measured_nodes_draw_what_the_load_says() -> None:
    """The one node with both figures: 8.4 of 10.2 kW is the upper end of the load."""
    power = energy.power("h100-80gb")
    assert power.node_measured_w is not None and power.node_max_w is not None
    assert power.node_measured_w / power.node_max_w == pytest.approx(energy.factors()["load"].high, abs=1e-3)


@given(st.floats(0, 1e9), st.floats(0.01, 1), st.floats(0, 1), st.floats(1, 3), st.sampled_from(KNOWN))
def test_energy_scales(hours: float, load: float, network: float, pue: float, gpu: str) -> None:
    kwh = energy.energy_kwh(hours, gpu, load, network, pue)
    assert kwh >= 0
    assert energy.energy_kwh(2 * hours, gpu, load, network, pue) == pytest.approx(2 * kwh)
    assert energy.energy_kwh(hours, gpu, load, network, 2 * pue) == pytest.approx(2 * kwh)
    assert energy.carbon_kg(kwh, "us") >= energy.carbon_kg(kwh, "fr")


def test_tables_say_where_their_numbers_are_from() -> None:
    assert all(each.source and each.checked in CHECKED for each in (*energy.powers().values(), *energy.published()))
    assert all(0 < kg < 1.2 for kg in energy.regions().values())
    assert all(low.low <= low.high for low in energy.factors().values())
    assert set(energy.powers()) <= {*hardware.gpus(), "tpu-v3"}
    assert (tables.folder() / "energy_factors.csv").is_file()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: energy.power("h300"), "gpu='h300'.*accepted are"),
        (lambda: energy.gpu_w("v100-32gb", 0.5), "no rating of its node"),
        (lambda: energy.carbon_kg(1, "atlantis"), "region='atlantis'"),
        (lambda: energy.carbon_kg(-1, "us"), "kwh must be"),
        (lambda: energy.energy_kwh(-1, "h100-80gb", 0.5), "gpu_hours must be"),
        (lambda: energy.energy_kwh(1, "h100-80gb", 1.5), "load must be"),
        (lambda: energy.energy_kwh(1, "h100-80gb", 0.5, 0, 0.9), "pue must be at least 1"),
        (lambda: energy.energy_kwh(float("nan"), "h100-80gb", 0.5), "gpu_hours must be"),
        (lambda: energy.check_metered("X"), "no such total"),
        (lambda: energy.check_metered("OLMo2-7B"), "pass computed_mwh"),
        (lambda: energy.check_metered("OLMo2-7B", -1), "computed_mwh must be a positive number"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]

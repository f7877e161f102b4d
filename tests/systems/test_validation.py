"""Published runs: the bars on fit and held-out rows, the split, the fit itself, and the intervals of whole runs."""

import hashlib
from itertools import groupby

import numpy as np
import pytest

from tq.systems import Cluster, calibration, predict, tables, validation, whole_runs
from tq.systems.efficiency import CONSTANTS, constants, efficiency, generations
from tq.systems.hardware import gpus
from tq.systems.validation import Row, median_error, published, table


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return table()


@pytest.mark.parametrize(("split", "bar"), [("fit", 0.05), ("held-out", 0.08)])
def test_median_error_of_times_is_below_the_bar(rows: list[Row], split: str, bar: float) -> None:
    kept = [row for row in rows if row.kind == "time" and row.split == split]
    assert len(kept) >= 10
    assert median_error(kept) <= bar


def test_mixtures_are_no_slower_than_published(rows: list[Row]) -> None:
    outside = [row for row in rows if row.split == "outside"]
    assert outside and all(row.error < 0 for row in outside)  # a lower bound, as the model of a step says


def test_memory_is_within_eight_percent(rows: list[Row]) -> None:
    kept = [row for row in rows if row.kind == "memory"]
    assert sum(row.same_formula for row in kept) == 12 and len(kept) >= 18
    assert max(abs(row.error) for row in kept) <= 0.08


@pytest.mark.parametrize("software", ["fsdp", "megatron-core"])
def test_new_generations_keep_the_bars_by_themselves(rows: list[Row], software: str) -> None:
    kept = [row for row in rows if row.kind == "time" and row.software.startswith(software)]
    for split, bar in (("fit", 0.05), ("held-out", 0.08)):
        assert median_error(kept, lambda row, split=split: row.split == split) <= bar


def test_the_unit_of_a_figure_round_trips() -> None:
    for row in published():
        if validation.is_timed(row):
            value = float(row["published_value"])
            assert validation.in_unit(row, validation.seconds(row)) == pytest.approx(value)


def test_shapes_have_the_parameters_that_the_rows_print() -> None:
    for row in published():
        if validation.is_timed(row):
            if row["experts"]:  # what the source counts as 352B is not said
                continue
            # papers round: "1.7B" is printed of 1.75 billion
            assert validation.shape(row).parameters / 1e9 == pytest.approx(float(row["params_B"]), rel=0.02, abs=0.06)


def test_the_split_is_the_one_that_its_rule_gives() -> None:
    timed = [row for row in published() if validation.is_timed(row) and "never fitted" not in row["note"]]
    first, second = ([row for row in timed if ("second batch" in row["note"]) is later] for later in (False, True))
    assert len(second) == 63  # a batch is split by itself, so that no row changes sides when another batch comes
    # the two runs of MT-NLG were filed under megatron-2021 when the split was made
    label = {"deepspeed-megatron-2021": "megatron-2021"}
    for batch in (first, second):
        named = sorted(batch, key=lambda row: label.get(row["software"], row["software"]))
        for _, group in groupby(named, key=lambda row: label.get(row["software"], row["software"])):
            ordered = sorted(group, key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
            sides = ["held-out" if k % 3 == 1 else "fit" for k in range(len(ordered))]
            assert [row["split"] for row in ordered] == sides
    added = [row for row in published() if "never fitted" in row["note"]]
    for row in added:
        side = "test" if row["note"].startswith("test:") else "outside" if row["experts"] else "held-out"
        assert row["split"] == side


def test_the_committed_constants_are_what_the_fit_gives() -> None:
    chosen = calibration.fit_rows()
    text = calibration.as_csv(calibration.fit(chosen), calibration.intervals(chosen), chosen)
    assert text == (tables.folder() / "efficiency.csv").read_text(encoding="utf-8")


def test_the_fit_reads_no_held_out_row_and_no_test_row(monkeypatch: pytest.MonkeyPatch) -> None:
    before = calibration.fit_rows()
    constants_before = calibration.fit(before)
    changed = tuple(
        row if row["split"] == "fit" else {**row, "published_value": "9" + row["published_value"]}
        for row in published()
    )
    monkeypatch.setattr(calibration, "published", lambda: changed)
    assert calibration.fit_rows() == before and calibration.fit(calibration.fit_rows()) == constants_before


def test_at_most_two_constants_a_gpu_and_two_a_generation() -> None:
    for (kind, name), values in constants().items():
        assert len(values) <= 2 and set(values) <= set(CONSTANTS[kind]), name


def test_the_fit_finds_the_constants_that_made_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [row for row in calibration.fit_rows() if row["gpu_type"] == "a100-80gb"]
    wanted = {("gpu", "a100-80gb"): (0.7, 0.85)}
    wanted |= {("software", row["software"]): (1.1, 0.8) for row in chosen}
    wanted["software", "megatron-2022"] = (1.0, 0.8)
    gpu = wanted["gpu", "a100-80gb"]
    made = {row["id"]: calibration._times(row, gpu, wanted["software", row["software"]]) for row in chosen}
    monkeypatch.setattr(calibration, "seconds", lambda row: made[row["id"]])
    errors = np.abs(calibration.errors(chosen, calibration.fit(chosen)))
    assert np.median(errors) < 0.005 and errors.max() < 0.03


def test_an_interval_holds_the_share_of_errors() -> None:
    low, high = calibration.interval(np.linspace(-0.2, 0.2, 41).tolist())
    assert low * high == pytest.approx(1) and np.log(high) == pytest.approx(0.17, abs=0.01)


def test_every_gpu_and_generation_has_constants() -> None:
    for gpu in gpus():
        for software in generations():
            found = efficiency(gpu, software)
            assert 0 < found.gemm <= 1 and 0 < found.low < 1 < found.high


def test_a_pair_that_was_not_fitted_together_is_known_less_well() -> None:
    fitted, pair, other = (efficiency(gpu, "megatron-core") for gpu in ("h100-80gb", "a100-80gb", "mi300x-192gb"))
    assert fitted.high < pair.high <= other.high and fitted.low > pair.low >= other.low
    same_chip = efficiency("a100-40gb", "megatron-core")
    assert (same_chip.gemm, same_chip.compute, same_chip.high) == (pair.gemm, pair.compute, pair.high)
    # nothing that a generation gains on one GPU type is carried over to another
    assert efficiency("h100-80gb", "megascale").compute > efficiency("a100-80gb", "megascale").compute
    assert efficiency("a100-80gb", "fsdp-h100-2023").compute == constants()["software", "fsdp-h100-2023"]["compute"]


def test_whole_run_intervals_cover_their_share() -> None:
    found = whole_runs.run_table()
    assert len(found) >= 18
    assert 0.7 <= whole_runs.coverage(found) <= 0.9
    for split in ("fit", "held-out"):
        assert 0.7 <= whole_runs.coverage([row for row in found if row.split == split]) <= 0.9


def test_hours_grow_with_work_and_shrink_with_peak() -> None:
    small, large = (whole_runs.accelerator_hours(n, 1e12, "a100-80gb") for n in (7e9, 70e9))
    assert large.median == pytest.approx(10 * small.median)
    assert small.low < small.median < small.high
    assert whole_runs.accelerator_hours(7e9, 1e12, "h100-80gb").median < small.median
    wide = whole_runs.accelerator_hours(7e9, 1e12, "a100-80gb", share=0.95)
    assert wide.low <= small.low and wide.high >= small.high


def test_uninterrupted_hours_are_steps_times_gpus() -> None:
    from tq.systems import Layout, Transformer

    found = predict(Transformer.preset("llama2-7b"), Layout(dp=64, global_batch=1024, zero=1), Cluster("a100-80gb", 64))
    hours = whole_runs.uninterrupted_hours(found, 2e12, 64)
    assert hours.median == pytest.approx(2e12 / found.tokens_per_s * 64 / 3600)


@pytest.mark.parametrize(("parameters", "tokens"), [(-1.0, 1e12), (7e9, 0.0), (float("nan"), 1e12)])
def test_bad_runs_raise(parameters: float, tokens: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        whole_runs.accelerator_hours(parameters, tokens, "a100-80gb")


def test_a_median_of_nothing_raises(rows: list[Row]) -> None:
    with pytest.raises(ValueError, match="no row is left"):
        median_error(rows, lambda row: row.kind == "smell")


def test_the_report_has_every_row_and_every_tool(rows: list[Row]) -> None:
    text = validation.report()
    assert all(row.id in text for row in rows)
    assert all(tool in text for tool, _, _ in validation.PEERS)
    held_out = [row for row in rows if row.kind == "time" and row.split == "held-out"]
    assert f"time, held-out: median {median_error(held_out):.1%}" in text

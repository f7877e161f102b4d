"""Errors on what had no part in the constants: left-out papers, sources of later, and honest coverages."""

import numpy as np
import pytest

from tq.systems import calibration, cross_validation, validation
from tq.systems.cross_validation import by_paper, coverage, held_out_coverage, leave_one_paper_out, paper
from tq.systems.validation import is_timed, median_error, published, table


def test_an_interval_that_counts_its_own_errors_flatters_itself() -> None:
    near, far = [0.01, -0.01, 0.012, -0.011, 0.009], [0.3, -0.31]
    stands, left = coverage(near + far, ["near"] * 5 + ["far"] * 2)
    assert stands == 1 and left == pytest.approx(5 / 7)  # the far ones say nothing of themselves any more
    draw = np.random.default_rng(0)
    both = [coverage(draw.normal(size=25).tolist()) for _ in range(200)]
    assert all(left <= stands for stands, left in both)
    assert np.mean([left for _, left in both]) == pytest.approx(0.8, abs=0.03)


def test_one_group_has_nothing_to_be_left_out_of() -> None:
    with pytest.raises(ValueError, match="at least two groups, got 1"):
        coverage([0.1, 0.2], ["a", "a"])


def test_intervals_of_held_out_times_hold_about_their_share_of_rows_left_out() -> None:
    stands, left = held_out_coverage()
    assert 0.7 <= left <= stands <= 0.9
    kept = [row for row in table() if row.kind == "time" and row.split == "held-out"]
    assert stands == pytest.approx(sum(row.covered for row in kept) / len(kept), abs=0.03)


def test_no_row_of_a_paper_has_a_part_in_its_own_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {row.id: row.log_error for row in leave_one_paper_out()}
    doubled = tuple(
        {**row, "published_value": str(2 * float(row["published_value"]))} if paper(row["id"]) == "K22" else row
        for row in published()
    )
    for module in (calibration, cross_validation):
        monkeypatch.setattr(module, "published", lambda: doubled)
    after = {row.id: row.log_error for row in leave_one_paper_out.__wrapped__()}
    mine = [name for name in before if paper(name) == "K22"]
    assert len(mine) >= 7 and {paper(name) for name in before} > {"K22"}
    for name in mine:
        assert after[name] - before[name] == pytest.approx(np.log(2))
    assert any(after[name] != before[name] for name in before if paper(name) == "MTNLG")  # the others did use it


def test_every_timed_row_is_predicted_without_its_paper() -> None:
    found = leave_one_paper_out()
    dense = [row for row in published() if is_timed(row) and row["split"] != "outside"]
    assert sorted(row.id for row in found) == sorted(row["id"] for row in dense)
    assert set(by_paper(found)) == {paper(row["id"]) for row in dense} and len(by_paper(found)) >= 15
    assert np.median([abs(row.error) for row in found]) <= 0.08


def test_what_was_never_fitted_to_is_predicted_as_ever() -> None:
    """Leaving a paper out changes nothing for the sources that no constants were fitted to."""
    blind = {row.id: row.error for row in table() if row.split == "test"}
    left = {row.id: row.error for row in leave_one_paper_out() if row.test}
    assert left == pytest.approx(blind, abs=2e-3) and len(blind) == 50  # the file rounds its constants


def test_test_rows_are_marked_and_keep_their_bar() -> None:
    rows = [row for row in published() if row["split"] == "test"]
    assert all("never fitted" in row["note"] for row in rows)
    assert {paper(row["id"]) for row in rows}.isdisjoint(paper(row["id"]) for row in calibration.fit_rows())
    assert median_error(table(), lambda row: row.split == "test") <= 0.08


def test_the_report_prints_all_three_errors_and_both_coverages() -> None:
    text, (stands, left) = cross_validation.report(), held_out_coverage()
    held_out = [row for row in table() if row.kind == "time" and row.split == "held-out"]
    assert f"rows held out: median {median_error(held_out):.1%}" in text and "sources never fitted to" in text
    values = [abs(row.error) for row in leave_one_paper_out()]
    assert f"leave one paper out: median {np.median(values):.1%} of {len(values)} rows" in text
    assert f"{stands:.0%} as it stands, {left:.0%} with each row left out" in text


def test_a_row_that_states_its_network_is_run_on_it() -> None:
    row = next(row for row in published() if row["id"] == "ILM-tp1-64")
    wide = {**row, "nic_gbit": ""}
    assert validation.run(row).parts["dp_total"] > 2 * validation.run(wide).parts["dp_total"]

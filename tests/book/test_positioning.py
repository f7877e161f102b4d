"""The matrix of methods shows what was measured and cited, and what is neither."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tests.book.rules import scaffold  # noqa: E402
from tq.book.site import positioning  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "data" / "positioning.csv").read_text(encoding="utf-8")
RESULTS: dict[str, dict[str, Any]] = {
    "industry-impact": {
        "provider/saving-at-their-prices": 0.13,
        "provider/network-share": (0.15, 0.09, 0.20),
        **{f"startup/saving/{t}": s for t, s in (("400g", 0.02), ("100g", 0.09), ("25g", 0.25))},
        **{f"startup/saving-whole/{t}": s for t, s in (("400g", 0.03), ("100g", 0.15), ("25g", 0.45))},
        **{f"startup/api/{name}": b for name, b in (("input", 1.2), ("output", 0.3), ("70b", 4.9))},
        "operator/network-power": (0.04, 0.017, 0.06),
        "operator/beside-nodes": 0.10,
    },
    "gradient-codes": {"formats/ours-4-bits/gap": (0.0, -0.005, 0.005), "formats/ours-4-bits/sent": 4.25},
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = h.claims_only(tmp_path, monkeypatch)
    h.write(root / "data" / "positioning.csv", TABLE)
    return root


def put(root: Path, changed: dict[str, Any]) -> None:
    for chapter, values in RESULTS.items():
        scaffold.put(root, chapter, {key: changed.get(key, value) for key, value in values.items()})


def test_every_cell_has_a_state_and_the_states_add_up(root: Path) -> None:
    found = positioning.cells()
    rows = list(csv.DictReader(io.StringIO(TABLE)))
    assert len(found) == len(rows) and sum(positioning.counts(found).values()) == len(rows)
    assert {cell.state for cell in found} <= set(positioning.STATES) - {positioning.MEASURED}
    assert positioning.matrix(found).isna().sum().sum() == 0


def test_a_measured_cell_reads_its_result_and_waits_for_it(root: Path) -> None:
    def wire() -> dict[str, positioning.Cell]:
        return {c.property: c for c in positioning.cells() if c.source == "gradient-codes/formats/ours-4-bits/sent"}

    assert {cell.state for cell in wire().values()} == {positioning.WAITING}
    put(root, {})
    assert {name: cell.short for name, cell in wire().items()} == {
        "wire": "4.25", "ratio_fp32": "7.53×", "ratio_bf16": "3.76×",
    }  # fmt: skip
    put(root, {"formats/ours-4-bits/sent": 8.0})
    assert {cell.short for cell in wire().values()} == {"8", "4×", "2×"}


def test_a_gap_that_rounds_to_nothing_has_no_sign(root: Path) -> None:
    for gap, shown in ((-0.0001, "0.000"), (0.0014, "+0.001"), (-0.02, "\N{MINUS SIGN}0.020")):
        put(root, {"formats/ours-4-bits/gap": gap})
        assert shown in {cell.short for cell in positioning.cells() if cell.property == "loss_gap"}


def test_cited_cells_keep_their_address_and_the_unknown_stay_unknown(root: Path) -> None:
    for cell in positioning.cells():
        assert (cell.source.startswith("http")) == (cell.state in (positioning.CITED, positioning.SECOND_HAND))
        assert cell.state != positioning.NOT_KNOWN or cell.short == "?"


def test_a_factor_on_the_time_is_the_inverse_of_a_speed_up(root: Path) -> None:
    scaffold.put(root, "activation-memory", {"time/bare-checkpoint": 1.25})
    (cell,) = (c for c in positioning.cells() if c.source == "activation-memory/time/bare-checkpoint")
    assert cell.short == "0.8×" and cell.condition == "step, CPU"


def test_numbers_that_do_not_compare_say_what_they_hold_for() -> None:
    """Every speed-up and every factor of memory that is measured here, and every cited speed-up with a number."""
    for row in csv.DictReader(io.StringIO(TABLE)):
        if row["property"] == "speed_up" and (row["status"] == "measured" or row["figure"]):
            assert row["condition"], row
        if row["property"] == "memory" and row["status"] == "measured":
            assert row["condition"], row


@pytest.mark.parametrize(("field", "value"), [("property", "beauty"), ("status", "asserted")])
def test_what_is_not_in_the_vocabulary_raises(root: Path, field: str, value: str) -> None:
    rows = list(csv.DictReader(io.StringIO(TABLE)))
    rows[0][field] = value
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    h.write(root / "data" / "positioning.csv", text.getvalue())
    with pytest.raises(ValueError, match=f"{field}='{value}'"):
        positioning.cells()


def test_every_measured_cell_of_the_committed_table_is_bound() -> None:
    rows = [row for row in csv.DictReader(io.StringIO(TABLE)) if row["status"] == "measured"]
    assert rows and all(row["binding"].startswith(f"{row['measured']}/") for row in rows)
    waiting = [c.source for c in positioning.cells() if c.state == positioning.WAITING]
    recorded = {path.stem for path in (ROOT / "data" / "results" / "cpu" / "full").glob("*.json")}
    assert [name for name in waiting if name.split("/")[0] in recorded] == [], "bound to a key that is not recorded"

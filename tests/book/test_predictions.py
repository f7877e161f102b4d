"""The scoreboard: predictions are judged by what was recorded, and none is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.book import helpers as h
from tq.book.site import predictions

HEAD = ",".join(predictions.COLUMNS)


def judged(root: Path, *rows: str) -> list[predictions.Prediction]:
    results = {"error": {"value": 0.5, "unit": "x"}, "none": {"value": None, "unit": "1"}}
    h.write(root / "data/results/cpu/full/demo.json", {"results": results})
    h.write(root / "data/predictions.csv", "\n".join([HEAD, *rows]) + "\n")
    return predictions.predictions(root)


def test_hit_miss_and_not_measured(tmp_path: Path) -> None:
    found = judged(
        tmp_path, "a,demo,Small.,,0.5,error,theory,Here", "b,demo,Large.,0.6,,error,theory,Here",
        "c,demo,Some.,0.4,0.6,none,theory,Here", "d,other,More.,1,2,key,theory,Here",
    )  # fmt: skip
    assert [one.outcome for one in found] == ["hit", "miss", "not measured", "not measured"]
    assert [one.allowed for one in found[:3]] == ["at most 0.5", "at least 0.6", "0.4 to 0.6"]
    assert predictions.counts(found) == {"hit": 1, "miss": 1, "not tested": 0, "not measured": 2}


def test_a_key_may_be_of_another_device(tmp_path: Path) -> None:
    h.write(tmp_path / "data/results/cuda/full/demo.json", {"results": {"error": {"value": 2.0, "unit": "x"}}})
    found = judged(
        tmp_path, "a,demo,Large.,1,,error@cuda,theory,Here", "b,demo,Large.,1,,error,theory,Here",
        "c,other,Large.,1,,error@cuda,theory,Here",
    )  # fmt: skip
    assert [(one.outcome, one.value) for one in found] == [("hit", 2.0), ("miss", 0.5), ("not measured", None)]
    with pytest.raises(ValueError, match="has recorded no 'none@cuda'"):
        judged(tmp_path, "a,demo,Large.,1,,none@cuda,theory,Here")


def test_a_value_that_tests_nothing_counts_for_nothing(tmp_path: Path) -> None:
    found = judged(
        tmp_path, "a,demo,Small.,,0.5,error,theory,Here,a bound was moved", "b,demo,Large.,0.6,,error,theory,Here,",
        "c,demo,Some.,0.4,0.6,none,theory,Here,the run was too short",
    )  # fmt: skip
    assert [one.outcome for one in found] == ["not tested", "miss", "not measured"]
    assert predictions.counts(found) == {"hit": 0, "miss": 1, "not tested": 1, "not measured": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,demo,Any.,,,error,theory,Here", "is no range"),
        ("a,demo,Any.,2,1,error,theory,Here", "is no range"),
        ("a,demo,Any.,1,2,missing,theory,Here", "has recorded no 'missing'"),
    ],
)
def test_what_cannot_fail_or_be_looked_up_is_refused(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judged(tmp_path, row)


def test_a_row_may_wait_for_a_chapter_that_is_to_be_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(predictions, "changed", lambda recording, notebook: asked.append(notebook) or ["tq/x.py"])
    found = judged(tmp_path, "a,demo,Any.,1,2,missing,theory,Here", "b,demo,Small.,,0.5,error,theory,Here")
    assert [one.outcome for one in found] == ["not measured", "hit"]
    assert asked == [tmp_path / "notebooks/demo.ipynb"]


def test_the_book_s_own() -> None:
    found = predictions.predictions()
    ids = [one.id for one in found]
    assert len(ids) == len(set(ids)) >= 40 and all(one.text.endswith(".") and one.why for one in found)
    chapters = {path.stem for path in (h.ROOT / "notebooks").glob("*.ipynb")}
    assert {one.chapter for one in found} <= chapters
    assert predictions.counts(found)["miss"] >= 1  # a book whose predictions all come true has left some out

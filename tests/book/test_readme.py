"""The README's measured table is what the recorded results say."""

from pathlib import Path

import pytest

from tq.book.site import readme

ROOT = Path(__file__).resolve().parents[2]


def test_readme_is_in_step_with_the_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.rewritten(text) == text, "run: python -m tq.book readme"


def test_a_changed_result_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"value": 0.123456, "unit": "1"}
    fake = {"device_name": "a device", "results": {"nmse/gradient/best": entry}}
    monkeypatch.setattr(readme, "load", lambda chapter, device: fake if device == "cpu" else None)
    lines = readme.table().splitlines()
    assert lines[2].endswith("| 0.1235 | not measured | a device |")
    assert lines[3].endswith("| not measured | not measured |  |")


def test_missing_markers_are_said() -> None:
    with pytest.raises(ValueError, match="measured:begin"):
        readme.rewritten("# no markers")

"""The README's findings are what the recorded results say."""

from pathlib import Path

import pytest

from tq.book.site import readme

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", readme.PAGES)
def test_readme_is_in_step_with_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert readme.rewritten(text) == text, "run: python -m tq.book readme"


def test_a_changed_result_changes_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = {"results": {"job/400g/saving": {"value": 0.123456, "unit": "1"}}}
    monkeypatch.setattr(readme, "load", lambda chapter: fake if chapter == "impact-training-cost" else None)
    first, *others = " ".join(readme.found().split()).split(" - ")
    assert "gradients save 12.3% of a 70B run" in first and "not measured on 100 Gbit/s" in first
    assert all("not measured" in other and "12.3%" not in other for other in others)


def test_it_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_missing_markers_are_said() -> None:
    with pytest.raises(ValueError, match="measured:begin"):
        readme.rewritten("# no markers")

"""What a quick chapter may take, held by what the committed recordings took. They are made on a quiet machine."""

from __future__ import annotations

import json

import pytest

from tests.book import helpers as h
from tq.book import paths

BYTES = 2e9  # resident, of the largest process
SECONDS = 40.0  # on two cores, the start of the kernel included


@pytest.mark.parametrize("chapter", paths.chapters())
def test_a_quick_chapter_stays_within_its_budgets(chapter: str) -> None:
    usage = json.loads((h.ROOT / f"data/results/cpu/quick/{chapter}.json").read_text())["usage"]
    assert usage["largest_bytes"] <= BYTES, f"{chapter} took {usage['largest_bytes'] / 1e9:.2f} GB"
    assert usage["wall_s"] <= SECONDS, f"{chapter} took {usage['wall_s']:.0f} s; its processors {usage['cpu_s']:.0f} s"

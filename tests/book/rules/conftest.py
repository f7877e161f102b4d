"""The book that rules are tested on."""

from pathlib import Path

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book with the claims and without any result."""
    return h.claims_only(tmp_path, monkeypatch)

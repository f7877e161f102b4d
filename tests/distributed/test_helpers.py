"""Ranks start at once, from a process that never had a second thread, and see the environment as it is now."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.helpers import outcomes, values


def here(rank: int, ranks: int) -> tuple[int, bool, str]:
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    return threads, "tests.distributed.preload" in sys.modules, os.environ["TQ_TEST"]


def test_ranks_are_forked_from_one_thread_that_has_imported_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said in ("first", "second"):
        monkeypatch.setenv("TQ_TEST", said)
        assert values(2, tmp_path / said, here) == [(1, True, said)] * 2


def nothing(rank: int, ranks: int) -> float:
    return time.process_time()


def test_a_rank_starts_without_importing_anything(tmp_path: Path) -> None:
    """Its processor time holds no import of torch (1.4 s and more), however busy the machine is."""
    assert max(values(4, tmp_path, nothing)) < 0.7


def dies(rank: int, ranks: int) -> int:
    if rank:
        os._exit(9)
    raise LookupError("what it says")


def test_the_outcomes_of_errors_and_of_deaths(tmp_path: Path) -> None:
    first, second = outcomes(2, tmp_path, dies, timeout_s=10)
    assert first["error"] == "LookupError: what it says" and "in dies" in first["trace"] and second == {}

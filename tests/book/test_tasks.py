"""Laws of tasks: done once, in their order, kept by what decides them, and a failure loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tq.book import tasks
from tq.train.lossgap import Run, fields, train

SHORT = {"preset": "tiny", "steps": 2, "workers": 2, "batch": 2, "max_bytes": 400_000}


def test_outcomes_come_in_order_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{**SHORT, "seed": seed} for seed in (1, 0, 1)]
    first = tasks.outcomes(train, runs, tmp_path, jobs=2)
    assert len(list(tmp_path.glob("*.pt"))) == 2
    assert torch.equal(first[0]["losses"], first[2]["losses"]) and first[0]["valid"] != first[1]["valid"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(tasks, "ProcessPoolExecutor", refuse)
    again = tasks.outcomes(train, runs, tmp_path)
    assert [a["valid"] for a in again] == [a["valid"] for a in first]
    monkeypatch.setattr(tasks, "module_hash", lambda *_: "other sources")
    with pytest.raises(AssertionError, match="computed again"):
        tasks.outcomes(train, runs, tmp_path)


def test_a_failing_task_keeps_the_others(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must divide batch=2"):
        tasks.outcomes(train, [SHORT, {**SHORT, "workers": 3}], tmp_path, jobs=1)
    assert len(list(tmp_path.glob("*.pt"))) == 1


def test_a_run_is_its_differing_fields() -> None:
    run = Run(bits=(2, 3), seed=5)
    assert fields(run) == {"bits": [2, 3], "seed": 5} and fields(Run()) == {}

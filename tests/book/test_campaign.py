"""Long runs, one committed file each, that go on where they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tq.book.__main__ import main
from tq.book.run import campaign
from tq.train.experiments import gpt2_scale, watched_runs

TINY = {
    "preset": "tiny", "steps": 6, "batch": 2, "workers": 2, "max_bytes": 200_000, "evaluated": 1, "vocab": 256,
    "seq": 32, "looks": [2, 4],
}  # fmt: skip
LOOKED = {k: v for k, v in TINY.items() if k not in ("vocab", "seq", "looks")} | {"look": 3, "batches": 1}
LONG = {"100k-fp32-0": LOOKED}
PLAN = {"tiny-fp32-0": TINY, "tiny-4-bits-0": TINY | {"variant": "gradient", "warmup": 2}}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("tokenizers")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_toc.yml").write_text("")
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    monkeypatch.setenv("TQ_CACHE", str(tmp_path))
    monkeypatch.setattr(gpt2_scale, "on_a_cpu", lambda autocast: PLAN)
    monkeypatch.setattr(watched_runs, "long_runs", lambda: LONG)
    monkeypatch.setattr(campaign, "fitting_autocast", lambda setting: None)
    return tmp_path


def test_runs_are_done_in_turn_and_written_small(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["campaign"]) for _ in range(3)] == [0, 0, 0]
    assert main(["campaign"]) == 1 and "all runs of the campaign are finished" in capsys.readouterr().err
    found = campaign.finished()
    assert list(found) == sorted([*LONG, *PLAN])
    plain, coded = found["tiny-fp32-0"], found["tiny-4-bits-0"]
    losses, others = (each["outcome"]["losses"] for each in (plain, coded))
    assert losses[:3] == others[:3] and losses != others and len(losses) == 6
    assert found["100k-fp32-0"]["outcome"]["steps"] == [3, 6] and found["100k-fp32-0"]["hours"] > 0
    assert set(plain["outcome"]["looks"]) == {"2", "4"} and plain["outcome"]["valid"] != coded["outcome"]["valid"]
    for name in ("commit", "sources", "versions", "device_name", "started", "ended", "task", "hours"):
        assert plain[name] or name == "commit", name  # which is null outside of a checkout
    assert (root / "data" / "campaign" / "tiny-fp32-0.json").stat().st_size < 100_000
    assert main(["campaign", "--list"]) == 0
    assert capsys.readouterr().out.count("  0.0 h") == 3


def test_a_name_that_is_not_planned_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["campaign", "huge"]) == 1 and "name must be one of 100k-fp32-0" in capsys.readouterr().err


def test_a_run_that_was_broken_off_goes_on_to_the_same_end(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gpt2_scale.train(PLAN["tiny-4-bits-0"])
    monkeypatch.setattr(gpt2_scale, "KEEP_S", 0.0)
    checkpoint, train, steps = tmp_path / "run.ckpt", gpt2_scale.Workers.train, []

    def breaks(self: Any, until: int | None = None, progress: bool = True) -> list[float]:
        steps.append(until)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return train(self, until, progress)

    monkeypatch.setattr(gpt2_scale.Workers, "train", breaks)
    with pytest.raises(KeyboardInterrupt):
        gpt2_scale.train(PLAN["tiny-4-bits-0"], checkpoint=checkpoint)
    assert json.loads(checkpoint.with_suffix(".json").read_text())["looks"].keys() == {"2", "4"}
    found = gpt2_scale.train(PLAN["tiny-4-bits-0"], checkpoint=checkpoint)
    assert torch.equal(found["losses"], whole["losses"])
    assert (found["valid"], found["looks"], found["drift"]) == (whole["valid"], whole["looks"], whole["drift"])
    assert not list(tmp_path.glob("run.*"))


def test_the_plan_names_pairs_and_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan = gpt2_scale.on_a_cpu("bfloat16")
    assert list(campaign.plan())[:2] == ["100k-fp32-0", "100k-4-bits-0"] and len(campaign.plan()) == len(plan) + 4
    assert next(iter(plan)) == "124m-fp32-0" and plan["355m-4-bits-0"]["preset"] == "gpt2-355m"
    assert plan["124m-null-0"] == plan["124m-4-bits-0"] | {"code_seed": 1000}
    assert plan["124m-4-bits-1"] == plan["124m-fp32-1"] | {"variant": "gradient", "warmup": 50}
    assert all(task["autocast"] == "bfloat16" and task["looks"] == [500, 1000] for task in plan.values())

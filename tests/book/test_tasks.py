"""Laws of tasks: done once, in their order, kept by what decides them, and a failure loses nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
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


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("after", [0.0, 5.0])  # while they still import, and later
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, after: float) -> None:
    script = tmp_path / "run.py"
    long = {**SHORT, "steps": 100_000}
    script.write_text(
        "from pathlib import Path\nfrom tq.book import tasks\nfrom tq.train.lossgap import train\n"
        f"if __name__ == '__main__':\n    runs = [{long!r}, {{**{long!r}, 'seed': 1}}]\n"
        f"    tasks.outcomes(train, runs, Path({str(tmp_path)!r}), jobs=2)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], cwd=Path(__file__).resolve().parents[2])
    try:
        deadline, workers = time.monotonic() + 60, []
        while len(workers) < 2 and time.monotonic() < deadline:
            children = psutil.Process(parent.pid).children(recursive=True)
            workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            time.sleep(0.1)
        assert len(workers) == 2
        time.sleep(after)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive

"""Laws of tasks: done once, in their order, kept by what decides them, and a failure loses nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from tq.book import outcomes, paths, tasks
from tq.book import runs as views
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


def test_outcomes_of_an_earlier_commit_count_after_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{**SHORT, "seed": seed} for seed in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "module_hash", lambda *_: "former sources")
        former = tasks.outcomes(train, runs, tmp_path, jobs=1)
    monkeypatch.setattr(tasks, "_sources_at", lambda *_: "former sources")
    spoilt = next(path for path in tmp_path.glob("*.pt") if torch.load(path)["valid"] == former[0]["valid"])
    good = spoilt.read_bytes()
    torch.save({**former[0], "valid": former[0]["valid"] + 1e-12}, spoilt)
    with pytest.raises(RuntimeError, match='another outcome than that of 0123456789: .*"seed": 0'):
        tasks.keep(train, runs, tmp_path, "0123456789abcdef", jobs=1)
    assert not tasks.kept(train, runs, tmp_path, "cpu") and len(list(tmp_path.glob("*.pt"))) == 4
    spoilt.write_bytes(good)
    (tmp_path / f"{tasks._key(train, runs[0], 'cpu')}.pt").unlink()
    tasks.keep(train, runs, tmp_path, "0123456789abcdef", jobs=1)
    assert tasks.kept(train, runs, tmp_path, "cpu") == [{"commit": "0123456789abcdef", "anew": 1, "of": 3}] * 2
    monkeypatch.setattr(tasks, "_compute", None)
    again = tasks.outcomes(train, runs, tmp_path, jobs=1)
    assert [a["valid"] for a in again] == [a["valid"] for a in former]


def test_outcomes_travel_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_toc.yml").touch()
    key = tasks.module_hash("tq.train.lossgap")
    monkeypatch.setattr(tasks, "module_hash", lambda *_: key)  # of the real tree
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    view = "chapter", "cpu", "quick"
    with pytest.raises(ValueError, match="no finished runs in"):
        outcomes.pack(*view)
    task = [{**SHORT, "seed": 0}]
    made = tasks.outcomes(train, task, views.tasks(*view), jobs=1)
    assert outcomes.pack(*view) == 1 and outcomes.unpack(*view) == (1, 0)
    first = outcomes.archive(*view).read_bytes()
    shutil.rmtree(paths.build())
    assert outcomes.unpack(*view) == (1, 1)
    monkeypatch.setattr(tasks, "_compute", None)
    assert tasks.outcomes(train, task, views.tasks(*view), jobs=1)[0]["valid"] == made[0]["valid"]
    outcomes.pack(*view)
    assert outcomes.archive(*view).read_bytes() == first
    outcomes.archive(*view).write_bytes(first[:100])
    with pytest.raises(ValueError, match="no archive of finished runs"):
        outcomes.unpack(*view)
    with tarfile.open(outcomes.archive(*view), "w:xz") as packed:
        packed.add(__file__, "../test.pt")
    with pytest.raises(ValueError, match="holds '../test.pt', which is no finished run"):
        outcomes.unpack(*view)


def test_the_sources_of_a_commit_are_those_of_its_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("tq", "kernels", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "_toc.yml").write_text("")
    (tmp_path / "tq" / "__init__.py").write_text("")
    (tmp_path / "tq" / "model.py").write_text("from tq import layer\n")
    (tmp_path / "tq" / "layer.py").write_text("FACTOR = 1\n")
    (tmp_path / "kernels" / "cpu.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    first = tasks.module_hash("tq.model")
    (tmp_path / "tq" / "layer.py").write_text("FACTOR = 2\n")
    assert tasks.module_hash("tq.model") != first
    assert tasks._sources_at("HEAD", "tq.model", "cpu") == first
    with pytest.raises(ValueError, match="commit='nowhere'"):
        tasks._sources_at("nowhere", "tq.model", "cpu")


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

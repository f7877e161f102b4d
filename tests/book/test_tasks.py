"""Laws of tasks: done once, in their order, kept by what decides them, and a failure loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tq.book import paths
from tq.book.record import tasks
from tq.book.run import archive
from tq.train.experiments.paired_runs import Run, fields, train

SHORT = {"preset": "tiny", "steps": 2, "workers": 2, "batch": 2, "max_bytes": 400_000}


def quick(task: dict[str, Any], device: str) -> float:
    """A task that fails, or loses its process, where it is told to."""
    if task.get("wait"):
        deadline = time.monotonic() + 60
        while not Path(task["wait"]).is_file() and time.monotonic() < deadline:
            time.sleep(0.01)
    if task.get("note"):
        Path(task["note"]).touch()
    if task.get("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if task.get("fails"):
        raise ValueError(f"told to fail: {task['n']}")
    return task["n"] / 2


def test_outcomes_come_in_order_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{"n": n} for n in (1, 0, 1)]
    assert tasks.outcomes(quick, runs, tmp_path, jobs=2) == [0.5, 0.0, 0.5]
    assert len(list(tmp_path.iterdir())) == 2

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(tasks, "_compute", refuse)
    assert tasks.outcomes(quick, runs, tmp_path, jobs=1) == [0.5, 0.0, 0.5]
    monkeypatch.setattr(tasks, "module_hash", lambda *_: "other sources")
    with pytest.raises(tasks.TasksFailed, match="computed again"):
        tasks.outcomes(quick, runs, tmp_path, jobs=1)


def test_chapters_share_what_they_have_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{"n": n} for n in (1, 2)]
    tasks.outcomes(quick, runs, tmp_path / "first", jobs=1)
    monkeypatch.setattr(tasks, "_compute", lambda *_: pytest.fail("computed again"))
    with pytest.raises(pytest.fail.Exception):  # alone, the second chapter has none of them
        tasks.outcomes(quick, runs[1:], tmp_path / "alone", jobs=1)
    assert tasks.outcomes(quick, runs[1:], tmp_path / "second", jobs=1, shared=tmp_path) == [1.0]
    assert [path.name for path in (tmp_path / "second").iterdir()] == [
        path.name for path in tasks.files(quick, runs[1:], tmp_path / "first", "cpu")
    ]


def test_an_outcome_tells_what_it_is_of(tmp_path: Path) -> None:
    task = {**SHORT, "seed": 3}
    tasks.outcomes(train, [task], tmp_path, jobs=1)
    kept = tasks.read(tasks.files(train, [task], tmp_path, "cpu")[0])
    assert tasks.named(kept["function"]) is train and kept["task"] == task and kept["value"]["valid"] > 0
    assert kept["device_name"] == tasks.device_name("cpu")
    assert kept["sources"] == tasks.module_hash(train.__module__, "cpu")


def test_runs_of_another_processor_count_and_those_of_another_gpu_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(device: str, model: str) -> str:
        monkeypatch.setattr(tasks, "device_name", lambda _: model)
        return tasks.file_name(quick, {"n": 1}, tasks.circumstances(quick, device))

    assert name("cpu", "a CPU") == name("cpu", "another CPU")
    assert name("cuda", "a GPU") != name("cuda", "another GPU")


def test_a_failing_task_keeps_what_is_done_and_cancels_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first task fails once the second runs: the second is kept, those that had not begun never begin."""
    began, failed, cancelled = tmp_path / "began", tmp_path / "failed", tmp_path / "cancelled"

    class Pool(ProcessPoolExecutor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.submitted: list[Future[Any]] = []

        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            self.submitted.append(super().submit(*args, **kwargs))
            return self.submitted[-1]

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            cancelled.touch()  # what runs now may end, and the next may not begin
            while not all(future.done() for future in self.submitted):
                time.sleep(0.01)

    monkeypatch.setattr(tasks, "ProcessPoolExecutor", Pool)
    first = {"n": 0, "fails": 1, "wait": str(began), "note": str(failed)}
    second = {"n": 1, "note": str(began)}
    third = {"n": 2, "wait": str(failed)}  # runs when the first fails, and is kept
    later = [{"n": n, "note": str(tmp_path / f"later-{n}"), "wait": str(cancelled)} for n in range(10, 30)]
    folder = tmp_path / "kept"
    with pytest.raises(tasks.TasksFailed, match=r"1 of 23 tasks failed(?s:.)*told to fail: 0"):
        tasks.outcomes(quick, [first, second, third, *later], folder, jobs=2)
    kept = [path.is_file() for path in tasks.files(quick, [second, third], folder, "cpu")]
    assert kept == [True, True]
    at_work, handed_out = 2, 2 + 1  # a pool holds one task more than it has workers ready for them
    assert len(list(tmp_path.glob("later-*"))) <= at_work + handed_out  # all others never began
    assert not list(folder.glob("*.running"))


def test_all_that_failed_are_named(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    both = [{"n": 1, "fails": 1, "note": str(gate)}, {"n": 2, "fails": 1, "wait": str(gate)}]
    with pytest.raises(tasks.TasksFailed) as failed:
        tasks.outcomes(quick, both, tmp_path / "kept", jobs=2)
    assert "2 of 2 tasks failed" in str(failed.value)
    assert "told to fail: 1" in str(failed.value) and "told to fail: 2" in str(failed.value)


def test_a_killed_worker_keeps_what_is_done(tmp_path: Path) -> None:
    done = tmp_path / "done"
    good, bad = {"n": 1, "note": str(done)}, {"n": 7, "killed": 1, "wait": str(tmp_path / "kept" / "x")}
    folder = tmp_path / "kept"
    bad["wait"] = str(tasks.files(quick, [good], folder, "cpu")[0])
    with pytest.raises(tasks.TasksFailed, match=r'"n": 7(?s:.)*killed.*out of memory') as failed:
        tasks.outcomes(quick, [good, bad, *({"n": n} for n in range(20, 24))], folder, jobs=2)
    assert tasks.files(quick, [good], folder, "cpu")[0].is_file() and '"n": 1}' not in str(failed.value)
    assert not list(folder.glob("*.running"))


def test_one_failing_task_in_this_process_keeps_the_others(tmp_path: Path) -> None:
    with pytest.raises(tasks.TasksFailed, match="told to fail: 3"):
        tasks.outcomes(quick, [{"n": 1}, {"n": 3, "fails": 1}], tmp_path, jobs=1)
    assert len(list(tmp_path.glob("*.pt"))) == 1


def test_outcomes_travel_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_toc.yml").touch()
    key = tasks.module_hash(quick.__module__)
    monkeypatch.setattr(tasks, "module_hash", lambda *_: key)  # of the real tree
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    view = "chapter", "cpu", "quick"
    with pytest.raises(ValueError, match="no finished runs in"):
        archive.pack(*view)
    both = [{"n": 1}, {"n": 2}]
    tasks.outcomes(quick, both, paths.tasks(*view), jobs=1)
    assert archive.pack(*view) == 2 and archive.unpack(*view) == (2, 0)
    first = archive.place(*view).read_bytes()
    shutil.rmtree(paths.build())
    assert archive.unpack(*view) == (2, 2)
    monkeypatch.setattr(tasks, "_compute", None)
    assert tasks.outcomes(quick, both, paths.tasks(*view), jobs=1) == [0.5, 1.0]
    archive.pack(*view)
    assert archive.place(*view).read_bytes() == first
    one = tasks.files(quick, both, paths.tasks(*view), "cpu")[0].name
    assert archive.pack(*view, names=[one]) == 1 and archive.unpack(*view) == (1, 0)
    archive.place(*view).write_bytes(first[:100])
    with pytest.raises(ValueError, match="no archive of finished runs"):
        archive.unpack(*view)
    with tarfile.open(archive.place(*view), "w:xz") as packed:
        packed.add(__file__, "../test.pt")
    with pytest.raises(ValueError, match="holds '../test.pt', which is no finished run"):
        archive.unpack(*view)


def test_a_run_is_its_differing_fields() -> None:
    run = Run(bits=(2, 3), seed=5)
    assert fields(run) == {"bits": [2, 3], "seed": 5} and fields(Run()) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("after", [0.0, 5.0])  # while they still import, and later
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, after: float) -> None:
    script = tmp_path / "run.py"
    long = {**SHORT, "steps": 100_000}
    script.write_text(
        "from pathlib import Path\nfrom tq.book.record import tasks\n"
        "from tq.train.experiments.paired_runs import train\n"
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

"""The runner on a tiny book: real papermill, real kernels, real kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.book import helpers as h
from tq.book.run.reproduce import ON_A_GPU, in_order, select

FIGURE = """from tq.book.record import figures
fig, ax = figures.figure("half")
ax.plot([1, 2], [3, 4])
ch.figure("line", fig, alt="A line that rises from <three> to four.", caption="A line")"""
GOOD = h.notebook('ch.record_samples("x", [1.0, 2.0, 3.0], "s");', FIGURE, "1 + 1", name="good")
BAD = h.notebook('ch.record("x", 1.0);', "# why\nraise RuntimeError('broken here')", "1", name="bad")
DEAD = h.notebook("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", name="dead")
ORPHAN = h.notebook("import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)", name="orphan")
SLOW = h.notebook(
    """import os, pathlib, time
def note(word):
    with open("../noted", "a") as file: file.write(word + "\\n")
def second():
    note(f"kernel {os.getpid()}")
    while not pathlib.Path("../go-on").exists(): time.sleep(0.05)
    return [2]""",
    "a = ch.piece('first', lambda: note('first') or [1])\nb = ch.piece('second', second)",
    "ch.record('sum', a[0] + b[0]);",
    name="slow",
)


def wait_for(what: str, seen, seconds: float = 200.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)


def noted(root: Path) -> list[str]:
    return (root / "noted").read_text().splitlines() if (root / "noted").exists() else []


def start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    def interruptible() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that starts the tests in the background ignores it

    with open(root / "log", "wb") as log:
        return subprocess.Popen(
            h.command("reproduce", *arguments), env=h.environment(root), cwd=root, stdout=log, stderr=log,
            preexec_fn=interruptible,
        )  # fmt: skip


def lives(process: psutil.Process) -> bool:
    # In a container nobody may collect orphans: a zombie is as dead as can be.
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def kernel_of(root: Path, number: int) -> psutil.Process:
    """The kernel that waits in its second piece for the number-th time."""
    kernels = lambda: [line for line in noted(root) if line.startswith("kernel")]  # noqa: E731
    wait_for("the second piece", lambda: len(kernels()) >= number)
    return psutil.Process(int(kernels()[-1].split()[1]))


def test_kills_and_what_follows_them(tmp_path: Path) -> None:
    root = h.book(tmp_path, {"good": GOOD, "slow": SLOW})
    run = start(root)
    kernel = kernel_of(root, 1)
    family = [*psutil.Process(run.pid).children(recursive=True), kernel]

    second = h.tq_book(root, "reproduce")
    assert second.returncode == 2 and f"process {run.pid}, started 2" in second.stderr

    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_for("the end of all processes", lambda: not any(map(lives, family)), 10)

    run = start(root)  # the lock is free, the finished chapter and the first piece are not done again
    kernel = kernel_of(root, 2)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=200) == 130
    assert not lives(kernel)
    log = (root / "log").read_text(encoding="utf-8")
    assert "good: unchanged since" in log and "slow: starts (broken off or failed before, 1 pieces kept" in log

    (root / "go-on").touch()
    last = h.tq_book(root, "reproduce")
    assert last.returncode == 0, last.stderr
    assert noted(root).count("first") == 1
    found = h.results(root, "slow")
    assert found["results"]["sum"]["value"] == 3 and not (root / "_build/pieces/cpu/quick/slow").exists()

    begin = time.monotonic()
    again = h.tq_book(root, "reproduce")
    assert time.monotonic() - begin < 10 and again.stderr.count("unchanged since") == 2
    assert h.results(root, "slow") == found


def test_a_run_may_end_after_some_minutes_and_goes_on(tmp_path: Path) -> None:
    root = h.book(tmp_path, {"slow": SLOW})
    for minutes in ("0.2", "0.4", "0.8"):  # a busy machine may need the first to come to the piece that waits
        assert start(root, "--minutes", minutes).wait(timeout=200) == 130
        if begun := [line for line in noted(root) if line.startswith("kernel")]:
            break
    kernel = int(begun[0].split()[1])
    assert not (psutil.pid_exists(kernel) and lives(psutil.Process(kernel)))
    assert "the time is up; finished chapters, pieces and runs are kept" in (root / "log").read_text(encoding="utf-8")
    (root / "go-on").touch()
    last = h.tq_book(root, "reproduce", "--minutes", "5")
    assert last.returncode == 0, last.stderr
    assert noted(root).count("first") == 1
    assert "minutes=0.0: more than 0" in h.tq_book(root, "reproduce", "--minutes", "0").stderr


def test_a_gpu_runs_first_what_it_tells_most_about() -> None:
    names = select([])
    assert in_order(names, "cpu") == names
    first = in_order(names, "cuda")
    assert first[:2] == ["on-a-gpu", "loss-at-scale"] and sorted(first) == sorted(names)
    assert set(ON_A_GPU) <= set(names)
    assert [name for name in first if name not in ON_A_GPU] == [name for name in names if name not in ON_A_GPU]


def test_a_failing_chapter_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    root = h.book(tmp_path, {"bad": BAD, "dead": DEAD, "orphan": ORPHAN, "good": GOOD})
    old = {"results": {"x": {"value": 7.0, "unit": "1"}}, "source_hash": "0"}
    h.write(root / "_build/results/cpu/quick/bad.json", old)
    done = h.tq_book(root, "reproduce", "--jobs", "2", "--device", "cpu")
    assert done.returncode == 1
    report = (root / "_build/report.md").read_text()
    assert report in done.stdout and "\x1b" not in done.stdout + done.stderr
    assert "3 chapters failed" in report and "good" not in report
    assert "## bad (cpu, quick), code cell 4 of 5\n\nRuntimeError: broken here\n" in report
    assert "    # why\n    raise RuntimeError('broken here')\n" in report
    assert "## dead (cpu, quick), code cell 3 of 3\n\nthe kernel died" in report
    assert "## orphan (cpu, quick), code cell 3 of 3\n\nits process ended with SIGKILL" in report
    partial = re.findall(r"Partial notebook: (\S+)", report)
    assert len(partial) == 3 and all((root / path).is_file() for path in partial)
    assert h.results(root, "good")["results"]["x"]["value"] == 2.0
    assert h.results(root, "bad")["results"]["x"]["value"] == 7.0  # what it had before
    assert "good: done in" in done.stderr and "bad: FAILED" in done.stderr


def test_the_fresh_run_becomes_the_committed_one(tmp_path: Path) -> None:
    root = h.book(tmp_path, {"good": GOOD})
    built = h.tq_book(root, "reproduce", "--book", "--device", "cpu")
    assert built.returncode == 0, built.stderr
    assert "good: done in" in built.stderr and "The book: _build/fresh/html/index.html" in built.stdout
    page = (root / "_build/fresh/html/notebooks/good.html").read_text()
    assert 'alt="A line that rises from &lt;three&gt; to four."' in page
    assert page.count("commit unknown") == 2 and "profile quick" in page  # under the title and under the figure

    # A run by hand may write to the same place; what is promoted is the run that the notebook shows.
    by_hand = root / "_build/results/cpu/quick/good.json"
    by_hand.write_text(by_hand.read_text().replace('"value": 2.0', '"value": 2.5'))
    promoted = h.tq_book(root, "promote", "good")
    assert promoted.returncode == 0, promoted.stderr
    assert h.results(root, "good", "data")["results"]["x"]["value"] == 2.0
    committed = (root / "notebooks/good.ipynb").read_text()
    assert "injected" not in committed and "papermill" not in committed and str(root) not in committed
    assert [c.get("execution_count") for c in json.loads(committed)["cells"]] == [None, 1, 2, 3, 4, 5]
    assert h.tq_book(root, "clean", "notebooks/good.ipynb").stdout == "notebooks/good.ipynb: is clean\n"
    assert "good: unchanged" in h.tq_book(root, "reproduce", "good").stderr  # its outputs are no source

    nb = json.loads(committed)
    nb["cells"][-1]["source"] = "1 + 2"
    h.write(root / "notebooks/good.ipynb", nb)
    refused = h.tq_book(root, "promote", "good")
    assert refused.returncode == 1 and "good (cpu, quick)" in refused.stderr and "Traceback" not in refused.stderr
    committed_page = h.tq_book(root, "build")
    assert committed_page.returncode == 0
    assert "stale: the sources have changed" in (root / "_build/html/notebooks/good.html").read_text()


def test_a_warning_fails_the_build_and_leaves_the_last_good_html(tmp_path: Path) -> None:
    root = h.book(tmp_path, {})
    h.write(root / "book/index.md", "# A tiny book\n\n[nowhere](missing.md)\n")
    h.write(root / "_build/html/index.html", "the last good one")
    done = h.tq_book(root, "build")
    assert done.returncode == 1 and re.search(r"book/index.md:3: WARNING.*missing.md", done.stderr)
    assert (root / "_build/html/index.html").read_text() == "the last good one"


def test_plain_papermill_does_the_same(tmp_path: Path) -> None:
    root = h.book(tmp_path, {"good": GOOD})
    arguments = ["notebooks/good.ipynb", "out.ipynb", "-k", "python3", "-p", "device", "cpu", "-p", "profile", "full"]
    if shutil.which("jupyter") is None:
        # A kernelspec comes with ipykernel's installation; where that lies on PYTHONPATH only, there is none.
        spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "p"}
        h.write(tmp_path / "jupyter/kernels/python3/kernel.json", {**spec, "language": "python"})
    env = {**h.environment(root), "JUPYTER_PATH": str(tmp_path / "jupyter")}
    subprocess.run([sys.executable, "-m", "papermill", "--no-progress-bar", *arguments], env=env, cwd=root, check=True)
    assert h.results(root, "good", view="cpu/full")["results"]["x"]["n"] == 3
    assert not (root / "_build/executed").exists()


def test_unknown_chapters_and_missing_notebooks(tmp_path: Path) -> None:
    root = h.book(tmp_path, {"good": GOOD, "other": GOOD})
    done = h.tq_book(root, "reproduce", "gud")
    assert done.returncode == 1 and "Did you mean 'good'? Chapters: good, other" in done.stderr
    (root / "notebooks/other.ipynb").unlink()
    assert "notebooks/other.ipynb does not exist" in h.tq_book(root, "status").stderr


def test_a_table_of_contents_is_read_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tq.book import paths

    root = h.book(tmp_path, dict.fromkeys("abcd", GOOD))
    parts = [
        {"chapters": [{"file": "notebooks/c"}, {"file": "book/x", "sections": [{"file": "notebooks/a"}]}]},
        {"caption": "Two", "chapters": [{"file": "notebooks/b.ipynb"}]},
    ]
    h.write(root / "_toc.yml", {"format": "jb-book", "root": "notebooks/d", "parts": parts})  # JSON is YAML
    monkeypatch.setenv("TQ_BOOK_ROOT", str(root))
    assert paths.chapters() == ["d", "c", "a", "b"]


def test_help_shows_examples_and_needs_no_book(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(h.ROOT)}
    done = subprocess.run(h.command("--help"), env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "python -m tq.book reproduce" in done.stdout
    assert subprocess.run(h.command("nonsense"), env=env, capture_output=True).returncode == 2

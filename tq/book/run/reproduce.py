"""Re-executes chapters with papermill, each in a process of its own, and says what moved.

Skips what is up to date and continues what was broken off. A chapter that fails stops no other and leaves the results
of its last good run untouched. Two runs at once in one tree are refused.
"""

from __future__ import annotations

import difflib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tq.book import paths
from tq.book.record.provenance import cores, resolve_device
from tq.book.run import compare, stamps
from tq.book.run.progress import Progress, clock
from tq.book.run.stamps import Busy, lock, now

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
# What a GPU tells more about than a CPU, the most wanted first: one may be lent for minutes only.
ON_A_GPU = (
    "on-a-gpu", "loss-at-scale", "kernels", "activation-memory", "optimizer-state", "offload-and-single-gpu",
    "training-tensors", "distortion", "compressed-adamw",
)  # fmt: skip
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def select(chapters: Sequence[str]) -> list[str]:
    """The named chapters in the book's order, all of them if none is named; an unknown name raises."""
    known = paths.chapters()
    for name in chapters:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"no chapter {name!r}.{hint} Chapters: {', '.join(known) or 'none yet'}")
    return [name for name in known if not chapters or name in chapters]


def in_order(chapters: Sequence[str], device: str) -> list[str]:
    """The order in which they are run: the book's, on a GPU by what it tells, the others after that."""
    if device != "cuda":
        return list(chapters)
    rank = {name: number for number, name in enumerate(ON_A_GPU)}
    return sorted(chapters, key=lambda name: rank.get(name, len(rank)))


@dataclass
class Failure:
    """Why a chapter gave no new results."""

    chapter: str
    error: str
    cell: int = 0
    of: int = 0
    source: str = ""
    traceback: str = ""


@dataclass
class _Job:
    chapter: str
    key: dict[str, Any]
    process: subprocess.Popen[bytes]
    pipe: int
    start: float
    buffer: bytes = b""
    cell: int = 0
    of: int = 0
    cells_s: list[float] | None = None
    usage: dict[str, float | None] = field(default_factory=dict)
    failure: dict[str, Any] = field(default_factory=dict)


class Runner:
    """Executes chapters of one view. `run` is all that is called from outside."""

    def __init__(self, device: str, profile: str, jobs: int) -> None:
        self.device, self.profile, self.jobs = device, profile, jobs
        self.where = stamps.folder(device, profile)
        self.failures: list[Failure] = []

    def _environment(self, out: Path) -> dict[str, str]:
        env = dict(os.environ)
        for variable in THREADS:
            env.setdefault(variable, str(max(1, cores() // self.jobs)))
        # The package must be found in notebooks/ too, and last, so that it comes before nothing that is installed.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(paths.PACKAGE)]))
        private = paths.build() / "runtime"  # no start-up files or histories of whoever runs this
        (private / "ipython").mkdir(parents=True, exist_ok=True)
        env |= {"IPYTHONDIR": str(private / "ipython"), "JUPYTER_RUNTIME_DIR": str(private)}
        env |= {"TQ_BOOK_ROOT": str(paths.root()), "TQ_BOOK_OUT": str(out), "JUPYTER_PLATFORM_DIRS": "1"}
        env |= {"PYTHONHASHSEED": "0", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        return env

    def _start(self, chapter: str) -> _Job:
        out, partial = (self.where / f"{chapter}.partial{suffix}" for suffix in ("", ".ipynb"))
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        partial.unlink(missing_ok=True)
        key = stamps.key(chapter, self.device, self.profile)
        read, write = os.pipe()
        arguments = [paths.notebook(chapter), partial, self.device, self.profile, write, os.getpid()]
        with open(self.where / f"{chapter}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tq.book.run._worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[write], env=self._environment(out), cwd=paths.root(),
                start_new_session=True,  # Ctrl-C reaches the runner alone, which then ends its children
            )  # fmt: skip
        os.close(write)
        return _Job(chapter, key, process, read, time.monotonic())

    def _finish(self, job: _Job) -> str:
        """Keeps what the chapter made, or notes why there is nothing to keep; returns the line to show."""
        code = job.process.wait()
        wall_s = time.monotonic() - job.start
        if code == 0 and job.cells_s is not None:
            self._keep(job, wall_s)
            peak = job.usage.get("largest_bytes")
            return f"done in {clock(wall_s)}" + (f", largest process {peak / 2**30:.2f} GiB" if peak else "")
        failure = dict(job.failure)
        if not failure:
            log = (self.where / f"{job.chapter}.log").read_text(encoding="utf-8", errors="replace").strip()
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            failure = {"error": f"its process ended with {how}", "traceback": log, "cell": job.cell, "of": job.of}
        self.failures.append(Failure(job.chapter, **failure))
        return f"FAILED after {clock(wall_s)}: {failure['error'].splitlines()[0]}"

    def _keep(self, job: _Job, wall_s: float) -> None:
        stem = self.where / job.chapter
        stamp, run = Path(f"{stem}.json"), Path(f"{stem}.run")
        stamp.unlink(missing_ok=True)  # from here to the last line the chapter counts as not finished
        shutil.rmtree(run, ignore_errors=True)
        os.replace(f"{stem}.partial", run)
        os.replace(f"{stem}.partial.ipynb", f"{stem}.ipynb")
        self._note_usage(job, run, wall_s)
        stamps.publish(job.chapter, self.device, self.profile)
        shutil.rmtree(paths.pieces(job.chapter, self.device, self.profile), ignore_errors=True)
        paths.write_json(stamp, {**job.key, "time_utc": now(), "wall_s": round(wall_s, 3), "cells_s": job.cells_s})

    def _note_usage(self, job: _Job, run: Path, wall_s: float) -> None:
        """What the run took, its start and its kernel included, beside what it recorded."""
        target = paths.place("results", self.device, self.profile, f"{job.chapter}.json", run)
        recorded = paths.read_json(target)
        if recorded is not None:
            paths.write_json(target, {**recorded, "usage": {**job.usage, "wall_s": round(wall_s, 1)}})

    @staticmethod
    def _read(job: _Job, progress: Progress) -> bool:
        """Takes in what the chapter says; False at its end."""
        data = os.read(job.pipe, 65536)
        *lines, job.buffer = (job.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "cell" in message:
                job.cell, job.of = message["cell"], message["of"]
                progress.cell(job.chapter, job.cell, job.of)
            job.cells_s = message.get("done", job.cells_s)
            job.usage = message.get("usage", job.usage)
            job.failure = message.get("failed", job.failure)
        return bool(data)

    def run(self, chapters: Sequence[str], reasons: dict[str, str]) -> list[str]:
        """Executes the chapters; returns those that went through. `failures` holds the others."""
        last = {name: stamps.stamp(name, self.device, self.profile) or {} for name in chapters}
        expected_s = {name: last[name]["wall_s"] for name in chapters if "wall_s" in last[name]}
        for name in set(chapters) - set(expected_s):
            committed = paths.read_json(self._committed(name))
            if committed is not None:
                expected_s[name] = committed["wall_s"]
        cells_s = {name: last[name].get("cells_s", []) for name in chapters}
        progress = Progress(chapters, expected_s, cells_s, self.jobs)
        waiting, running, done = list(chapters), dict[int, _Job](), []
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        name = waiting.pop(0)
                        job = self._start(name)
                        running[job.pipe] = job
                        selector.register(job.pipe, selectors.EVENT_READ)
                        progress.start(name, reasons[name])
                    for event, _ in selector.select(timeout=0.5):
                        job = running[event.fd]
                        if self._read(job, progress):
                            continue
                        selector.unregister(job.pipe)
                        os.close(job.pipe)
                        line = self._finish(job)
                        del running[event.fd]
                        progress.finish(job.chapter, line)
                        if not any(failure.chapter == job.chapter for failure in self.failures):
                            done.append(job.chapter)
                    progress.tick()
            finally:
                progress.close()
                self._end(list(running.values()))
        return done

    def _committed(self, chapter: str) -> Path:
        return paths.place("results", self.device, self.profile, f"{chapter}.json", paths.root() / "data")

    @staticmethod
    def _end(jobs: Sequence[_Job]) -> None:
        for job in jobs:
            job.process.send_signal(signal.SIGTERM)  # it takes its kernel along
        for job in jobs:
            try:
                job.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()


def report(failures: Sequence[Failure], device: str, profile: str) -> str:
    """What failed, where and why, as Markdown that also reads well in a terminal."""
    if not failures:
        return "All chapters went through.\n"
    parts = [f"{len(failures)} chapter{'s' if len(failures) > 1 else ''} failed; earlier results stay as they were.\n"]
    for failure in failures:
        stem = (stamps.folder(device, profile) / failure.chapter).relative_to(paths.root()).as_posix()
        place = f", code cell {failure.cell} of {failure.of}" if failure.cell else ""
        parts.append(f"## {failure.chapter} ({device}, {profile}){place}\n\n{failure.error}\n")
        if failure.source:
            parts.append("The cell:\n\n" + _indented(failure.source))
        if failure.traceback:
            parts.append("Its last lines:\n\n" + _indented("\n".join(failure.traceback.splitlines()[-15:])))
        parts.append(f"Partial notebook: {stem}.partial.ipynb\nLog: {stem}.log\n")
    return "\n".join(parts)


def _indented(text: str) -> str:
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("the time is up" if number == signal.SIGALRM else "interrupted")


def reproduce(
    chapters: Sequence[str] = (),
    device: str = "auto",
    profile: str = "quick",
    *,
    jobs: int = 1,
    force: bool = False,
    minutes: float | None = None,
) -> int:
    """Executes the chapters (none named: all) that are not up to date; returns the exit code.

    0: all went through. 1: a chapter failed. 2: another run is under way. 130: interrupted.
    force: also those up to date, and from their beginning. minutes: interrupt it after so long; what has finished is
    kept.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs!r}: at least 1")
    if minutes is not None and not 0 < minutes < 1e6:
        raise ValueError(f"minutes={minutes!r}: more than 0")
    device = resolve_device(device)
    paths.check_view(device, profile)
    names = in_order(select(chapters), device)
    before = signal.signal(signal.SIGTERM, _interrupt)
    if minutes is not None:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        with lock():
            return _locked(names, device, profile, jobs, force)
    except Busy as busy:
        print(busy, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt as stop:
        why = str(stop) or "interrupted"
        print(f"\n{why}; finished chapters, pieces and runs are kept, the next run continues", file=sys.stderr)
        return INTERRUPTED
    finally:
        if minutes is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before)


def _locked(names: Sequence[str], device: str, profile: str, jobs: int, force: bool) -> int:
    if not names:
        print("_toc.yml lists no executable chapter yet", file=sys.stderr)
    reasons = {}
    for name in names:
        why = stamps.why_run(name, device, profile)
        if force:
            shutil.rmtree(paths.pieces(name, device, profile), ignore_errors=True)
            shutil.rmtree(paths.tasks(name, device, profile), ignore_errors=True)
        if why is None and not force:
            stamps.publish(name, device, profile)  # nbval or a run by hand may have written there since
            stamp = stamps.stamp(name, device, profile) or {}
            print(f"{name}: unchanged since {stamp['time_utc']}, skipped", file=sys.stderr)
        else:
            reasons[name] = why if why is not None and not force else "forced"
    runner = Runner(device, profile, jobs)
    runner.run(list(reasons), reasons)
    text = report(runner.failures, device, profile)
    paths.write_text(paths.build() / "report.md", text)
    print(("\n" if runner.failures else "") + text, end="")
    rows = compare.diff(names, device, profile)
    compare.write_page(rows)
    print(compare.summary(rows))
    return FAILED if runner.failures else OK

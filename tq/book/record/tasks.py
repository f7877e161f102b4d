"""Long computations as tasks: done once, several at a time, kept whatever else of a chapter changes.

A task is a function of a module of ``tq`` and plain arguments. Its outcome is kept in a folder under a name that holds
two hashes: of the function and its arguments, and of what they ran on (the module and all that it imports, the
versions, the GPU). So an edited figure does not train a model again, an edited optimizer does, a run that was killed
goes on where it was, and chapters share the runs that they have in common. Runs of another processor count: rounding
differs there as it does with another order of sums, and a long campaign changes machines; a recording names them all.
Outcomes of former sources stay: ``tq.book.run.revalidate`` may let them count again.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # not tqdm.auto: a widget does not survive in a committed notebook

from tq.book import paths
from tq.book.record.dependencies import module_hash
from tq.book.record.provenance import commit, cores, device_name, versions

SUFFIX, RUNNING = ".pt", ".running"


class TasksFailed(RuntimeError):
    """Tasks that gave no outcome. What had finished is kept, so the next run begins with what is missing."""


def circumstances(function: Callable[..., Any], device: str) -> dict[str, Any]:
    """What outcomes of a function depend on beside its arguments."""
    return {
        "sources": module_hash(function.__module__, device),
        "versions": versions(),
        "device": device,
        "device_name": device_name(device),
    }


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def file_name(function: Callable[..., Any], task: dict[str, Any], around: dict[str, Any]) -> str:
    """``<what is computed>-<under which circumstances>.pt``."""
    decides = {k: v for k, v in around.items() if k != "device_name" or around["device"] != "cpu"}
    return f"{_short([_name(function), task])}-{_short(decides)}{SUFFIX}"


def files(function: Callable[..., Any], tasks: Sequence[dict[str, Any]], folder: Path, device: str) -> list[Path]:
    """Where the outcomes of these tasks are kept, in their order; there or not."""
    around = circumstances(function, device)
    return [folder / file_name(function, task, around) for task in tasks]


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def named(name: str) -> Callable[..., Any]:
    """The function of a name ``module:function`` as outcomes hold it."""
    module, _, qualname = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), qualname)
    return found


def read(path: Path) -> dict[str, Any]:
    """A kept outcome: ``function``, ``task``, ``value``, ``commit`` and its circumstances."""
    kept: dict[str, Any] = torch.load(path, weights_only=True)
    return kept


def write(path: Path, kept: dict[str, Any]) -> None:
    """Keeps an outcome; the same content gives the same file."""
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    paths.write_bytes(path, buffer.getvalue())


def _end_with(parent: int) -> None:
    """A worker that outlived the chapter would train for nobody. Linux only; elsewhere it ends with its task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # which ended while this process was still importing
            os._exit(1)


def _compute(name: str, task: dict[str, Any], device: str, threads: int, path: Path, around: dict[str, Any]) -> None:
    """Computes one task and keeps its outcome: by the worker itself, so nothing that happens to others loses it."""
    torch.set_num_threads(threads)
    mark = path.with_suffix(RUNNING)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()  # stays behind where this process is killed
    try:
        value = named(name)(task, device=device)
        write(path, {"function": name, "task": task, "value": value, "commit": commit()[0], **around})
    finally:
        mark.unlink(missing_ok=True)


def outcomes(
    function: Callable[..., Any],
    tasks: Sequence[dict[str, Any]],
    folder: Path,
    device: str = "cpu",
    jobs: int | None = None,
    shared: Path | None = None,
) -> list[Any]:
    """``function(task, device=device)`` of every task, in their order; what was kept is not computed again.

    Arguments:
        function: of a module of ``tq``; returns tensors, numbers, texts and lists and dicts of these.
        tasks: JSON values; the same task may come twice.
        folder: where the outcomes are kept.
        jobs: processes at a time, one thread each; None: every core, or one on a GPU. One job runs in this process.
        shared: a folder of such folders; what one of them keeps of these tasks is copied instead of computed.

    Raises ``TasksFailed``, which names every task that failed. After the first failure no other task is begun.
    """
    jobs = (cores() if device == "cpu" else 1) if jobs is None else jobs
    around = circumstances(function, device)
    where = files(function, tasks, folder, device)
    missing = {path: task for path, task in zip(where, tasks, strict=True) if not _kept(path, shared)}
    for path in missing:
        path.with_suffix(RUNNING).unlink(missing_ok=True)
    if missing and jobs == 1:
        for path, task in tqdm(missing.items(), unit="run", disable=None):
            try:
                _compute(_name(function), task, device, torch.get_num_threads(), path, around)
            except Exception as error:
                raise TasksFailed(_report([(task, error)], len(missing), folder)) from error
    elif missing:
        failed = _in_processes(function, missing, device, min(jobs, len(missing)), around)
        if failed:
            raise TasksFailed(_report(failed, len(missing), folder)) from failed[0][1]
    return [read(path)["value"] for path in where]


def _kept(path: Path, shared: Path | None) -> bool:
    """Whether the outcome is there, now that one of another chapter has been taken over."""
    if not path.is_file() and shared is not None:
        for twin in shared.glob(f"*/{path.name}"):
            paths.write_bytes(path, twin.read_bytes())
            break
    return path.is_file()


def _in_processes(
    function: Callable[..., Any], missing: dict[Path, dict[str, Any]], device: str, jobs: int, around: dict[str, Any]
) -> list[tuple[dict[str, Any], Exception]]:
    """Computes what is missing, one thread a process; returns the tasks that failed and why."""
    failed: list[tuple[dict[str, Any], Exception]] = []
    method = get_context("spawn")
    with _one_thread(), ProcessPoolExecutor(jobs, method, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        running = {
            pool.submit(_compute, _name(function), task, device, 1, path, around): task
            for path, task in missing.items()
        }
        try:
            for done in tqdm(as_completed(running), total=len(running), unit="run", disable=None):
                if done.exception() is not None:
                    break
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # those that run go on to their end, and are kept
    for future, task in running.items():
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Exception) and not isinstance(error, BrokenProcessPool):
            failed.append((task, error))
    for path, task in missing.items():
        if path.with_suffix(RUNNING).exists():
            path.with_suffix(RUNNING).unlink()
            if not path.is_file():
                why = "its process was killed, or ended with one that was (out of memory?)"
                failed.append((task, RuntimeError(why)))
    return failed


@contextmanager
def _one_thread() -> Iterator[None]:
    """For the processes that are started in the block."""
    previous = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if previous is not None:
            os.environ["OMP_NUM_THREADS"] = previous


def _report(failed: Sequence[tuple[dict[str, Any], Exception]], of: int, folder: Path) -> str:
    lines = [f"{json.dumps(task)}: {type(error).__name__}: {error}" for task, error in failed]
    return "\n".join([f"{len(failed)} of {of} tasks failed; what had finished is kept in {folder.name}:", *lines])

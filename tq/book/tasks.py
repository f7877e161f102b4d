"""Long computations as tasks: done once, several at a time, kept whatever else of a chapter changes.

A task is a function of a module of ``tq`` and plain arguments. Its outcome is kept under ``_build/tasks`` by a hash of
the module and all that it imports, the arguments, the versions and the device: an edited figure does not train a
model again, an edited optimizer does. So a run that was killed goes on where it was, and different chapters share.

An edit that should change no outcome (a message, a function that they do not use) need not cost hours: outcomes of an
earlier commit count again after every tenth of them was computed anew and has the same bits (``keep``). The others are
marked, and whoever records them says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm  # not tqdm.auto: a widget does not survive in a committed notebook

from tq.book import paths
from tq.book.provenance import cores, device_name, versions
from tq.book.sources import module_hash

EACH = 10  # every so manieth outcome of an earlier commit is computed anew


def _key(function: Callable[..., Any], arguments: dict[str, Any], device: str, sources: str | None = None) -> str:
    what = {
        "function": f"{function.__module__}.{function.__qualname__}",
        "sources": module_hash(function.__module__, device) if sources is None else sources,
        "arguments": arguments,
        "versions": versions(),
        "device_name": device_name(device),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _end_with(parent: int) -> None:
    """A worker that outlived the chapter would train for nobody. Linux only; elsewhere it ends with its task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # which ended while this process was still importing
            os._exit(1)


def _compute(module: str, name: str, arguments: dict[str, Any], device: str, threads: int) -> bytes:
    torch.set_num_threads(threads)
    function = getattr(import_module(module), name)
    buffer = io.BytesIO()
    torch.save(function(arguments, device=device), buffer)
    return buffer.getvalue()


def outcomes(
    function: Callable[..., Any],
    tasks: Sequence[dict[str, Any]],
    folder: Path,
    device: str = "cpu",
    jobs: int | None = None,
) -> list[Any]:
    """``function(task, device=device)`` of every task, in their order; what was kept is not computed again.

    Arguments:
        function: of a module of ``tq``; returns tensors, numbers, texts and lists and dicts of these.
        tasks: JSON values; the same task may come twice.
        folder: where the outcomes are kept.
        jobs: processes at a time, one thread each; None: every core, or one on a GPU. One job runs in this process.
    """
    jobs = (cores() if device == "cpu" else 1) if jobs is None else jobs
    files = [folder / f"{_key(function, task, device)}.pt" for task in tasks]
    missing = {path: task for path, task in zip(files, tasks, strict=True) if not path.is_file()}
    if missing and jobs == 1:
        for path, task in tqdm(missing.items(), unit="run", disable=None):
            outcome = _compute(function.__module__, function.__qualname__, task, device, torch.get_num_threads())
            paths.write_bytes(path, outcome)
    elif missing:
        previous = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started below
        try:
            count, method = min(jobs, len(missing)), get_context("spawn")
            with ProcessPoolExecutor(count, method, initializer=_end_with, initargs=(os.getpid(),)) as pool:
                running = {
                    pool.submit(_compute, function.__module__, function.__qualname__, task, device, 1): path
                    for path, task in missing.items()
                }
                for done in tqdm(as_completed(running), total=len(running), unit="run", disable=None):
                    paths.write_bytes(running[done], done.result())
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if previous is not None:
                os.environ["OMP_NUM_THREADS"] = previous
    return [torch.load(path, weights_only=True) for path in files]


def _sources_at(commit: str, module: str, device: str) -> str:
    """``module_hash`` of the tree at a commit."""
    command = ["git", "-C", str(paths.root()), "archive", commit, "tq", "kernels"]
    done = subprocess.run(command, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError(f"commit={commit!r}: {done.stderr.decode(errors='replace').strip()}")
    with TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        return module_hash(module, device, Path(folder).resolve())


def _same(a: Any, b: Any) -> bool:
    """Equal bit by bit, NaN included."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and repr(a) == repr(b)


def keep(
    function: Callable[..., Any],
    tasks: Sequence[dict[str, Any]],
    folder: Path,
    commit: str,
    device: str = "cpu",
    jobs: int | None = None,
) -> None:
    """Lets outcomes that the code of a commit gave count as today's, where today's code gives a sample the same bits.

    Raises RuntimeError for a sample that differs, and then nothing is taken over.
    """
    before = _sources_at(commit, function.__module__, device)
    former = {}
    for task in tasks:
        target = folder / f"{_key(function, task, device)}.pt"
        source = folder / f"{_key(function, task, device, before)}.pt"
        if source.is_file() and not target.is_file():
            former[target] = source, task
    sample = list(former)[::EACH]
    anew = outcomes(function, [former[target][1] for target in sample], folder, device, jobs)
    for target, outcome in zip(sample, anew, strict=True):
        source, task = former[target]
        if not _same(outcome, torch.load(source, weights_only=True)):
            raise RuntimeError(f"today's code gives another outcome than that of {commit[:10]}: {json.dumps(task)}")
    mark = json.dumps({"commit": commit, "anew": len(sample), "of": len(former)})
    for target in former.keys() - set(sample):
        paths.write_bytes(target.with_suffix(".json"), mark.encode())
        paths.write_bytes(target, former[target][0].read_bytes())


def kept(function: Callable[..., Any], tasks: Sequence[dict[str, Any]], folder: Path, device: str) -> list[Any]:
    """Of every task whose outcome was taken over: the commit, and how many of how many outcomes were computed anew."""
    marks = {folder / f"{_key(function, task, device)}.json" for task in tasks}
    return [json.loads(mark.read_text()) for mark in sorted(marks) if mark.is_file()]

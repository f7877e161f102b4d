"""What saving costs a training loop and what a kill leaves behind: PyTorch's distributed checkpoint beside ours."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tq.train import tqk
from tq.train.tqk.dcp import Reader, Writer

State = dict[str, Any]


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process, without which ``async_save`` of PyTorch does nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stalls(state: State, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds that a training loop waits for a checkpoint, way by way in turns; the first turn of each is left out.

    ``copy`` is a copy of all tensors into memory that is there already: the least that any way can take.
    """
    into = {name: tensor.clone() for name, tensor in state.items()}

    def copied() -> None:
        for name, tensor in state.items():
            into[name].copy_(tensor)

    def synchronously() -> None:
        with open(folder / "whole.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    waits: dict[str, Callable[[], Any]] = {}
    behind = tqk.Background(lambda copy: tqk.save(folder / "behind.tqk", copy, threads=1))
    with warnings.catch_warnings(), alone(), behind:
        warnings.simplefilter("ignore")  # that a checkpoint is there already

        def theirs() -> Any:
            return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp", overwrite=True))

        stager = DefaultStager(StagingOptions(False, False, True, False))  # in a thread, kept

        def theirs_cached() -> Any:
            writer = dcp.FileSystemWriter(folder / "dcp-cached", overwrite=True)
            pending: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager)
            pending.staging_completion.result()  # before this, an optimizer's step gets into the file
            return pending

        waits = {
            "copy": copied, "new copy": lambda: [tensor.clone() for tensor in state.values()],
            "torch.save": synchronously, "ours": lambda: tqk.save(folder / "whole.tqk", state),
            "torch async": theirs, "torch async cached": theirs_cached, "ours async": lambda: behind.save(state),
        }  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in waits}
        for turn in range(repeats + 1):
            for name, wait in waits.items():
                began = time.perf_counter()
                pending = wait()
                if turn:
                    taken[name].append(time.perf_counter() - began)
                pending = getattr(pending, "upload_completion", pending)
                if hasattr(pending, "result"):
                    pending.result()
    return taken


def cold_loads(state: State, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds to load a state whose file is not in memory, way by way in turns, ``torch`` and ``ours``; and to only
    read each file (``read torch``, ``read ours``)."""
    files = {"torch": folder / "cold.pt", "ours": folder / "cold.tqk"}
    torch.save(state, files["torch"])
    tqk.save(files["ours"], state)
    ways: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.load(files["torch"]), "ours": lambda: tqk.load(files["ours"]),
        "read torch": files["torch"].read_bytes, "read ours": files["ours"].read_bytes,
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, load in ways.items():
            for path in files.values():
                _forget(path)
            began = time.perf_counter()
            load()
            taken[name].append(time.perf_counter() - began)
    return taken


def _forget(path: Path) -> None:
    """Out of the memory of the operating system, so that the next read is one of the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def slowdown(step: Callable[[], Any], state: State, folder: Path, steps: int, repeats: int) -> list[float]:
    """How many times longer steps take while states are saved in the background without a pause, pair by pair."""
    ratios = []
    with tqk.Background(lambda copy: tqk.save(folder / "beside.tqk", copy, threads=1)) as behind:
        behind.save(state).result()
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in range(steps):
                step()
            alone_s, began = time.perf_counter() - began, time.perf_counter()
            pending, copying = behind.save(state), behind.stalled_s
            for _ in range(steps):
                if pending.done():
                    pending = behind.save(state)
                    copying += behind.stalled_s
                step()
            ratios.append((time.perf_counter() - began - copying) / alone_s)
            pending.result()
    return ratios


class Way(NamedTuple):
    """Saves a state into a folder, and loads one from it."""

    save: Callable[[State, Path], Any]
    load: Callable[[Path], State]


_SIZE = 200_000


def _empty() -> State:
    return {"w": torch.zeros(_SIZE), "step": torch.zeros(1)}


def _renamed(state: State, folder: Path) -> None:
    torch.save(state, folder / "x.pt.part")
    os.replace(folder / "x.pt.part", folder / "x.pt")


def _load_dcp(folder: Path, reader: type) -> State:
    state = _empty()
    dcp.load(state, storage_reader=reader(folder), no_dist=True)
    return state


WAYS = {
    "torch.save": Way(
        lambda state, folder: torch.save(state, folder / "x.pt"), lambda folder: torch.load(folder / "x.pt")
    ),
    "torch.save renamed": Way(_renamed, lambda folder: torch.load(folder / "x.pt")),
    "torch dcp": Way(
        lambda state, folder: dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True),
        lambda folder: _load_dcp(folder, dcp.FileSystemReader),
    ),
    "ours": Way(
        lambda state, folder: tqk.save(folder / "x.tqk", state, threads=1), lambda folder: tqk.load(folder / "x.tqk")
    ),
    "ours dcp": Way(
        lambda state, folder: dcp.save(state, storage_writer=Writer(folder, threads=1), no_dist=True),
        lambda folder: _load_dcp(folder, Reader),
    ),
}


def state_at(step: int) -> State:
    """A state of random numbers that only this step has."""
    numbers = torch.randn(_SIZE, generator=torch.Generator().manual_seed(step))
    return {"w": numbers, "step": torch.tensor([float(step)])}


def _step_of(way: Way, folder: Path) -> int | None:
    """The step of what is loaded; None if nothing can be. AssertionError for numbers of two steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # PyTorch writes tracebacks of what it does not find
        try:
            state = way.load(folder)
        except KeyboardInterrupt:
            raise
        except BaseException:  # PyTorch's CheckpointException is no Exception
            return None
        finally:
            logging.disable(before)
    step = float(state["step"][0])
    right = step.is_integer() and 0 <= step < 1e6 and torch.equal(state["w"], state_at(int(step))["w"])
    return int(step) if right else -1


def kill(way: Way, folder: Path, many: int, seed: int = 0) -> dict[str, int]:
    """Kill a process that saves over and over into one place, at random moments.

    Returns:
        How often nothing could be loaded afterwards (``lost``), or numbers of two steps (``torn``), of ``kills``; and
        the last step that was found, added up (``steps``): a way that saves nothing loses nothing.
    """
    draw, found = random.Random(seed), {"kills": many, "lost": 0, "torn": 0, "steps": 0}
    for _ in range(many):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            way.save(state_at(0), folder)
            child = os.fork()
            if child == 0:
                with suppress(BaseException):
                    torch.set_num_threads(1)  # the pool of threads did not come along
                    step = 0
                    while True:
                        step += 1
                        way.save(state_at(step), folder)
                os._exit(1)
        time.sleep(draw.uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step_found = _step_of(way, folder)
        found["lost"] += step_found is None
        found["torn"] += step_found == -1
        found["steps"] += max(0, step_found or 0)
    return found


def flip(way: Way, folder: Path, many: int, seed: int = 0) -> dict[str, int]:
    """Flip one bit of what was saved, so many times.

    Returns:
        How often another state was loaded in silence (``silent``), and how often it was ``refused``, of ``flips``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        way.save(state_at(3), folder)
    file = max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    whole, draw = file.read_bytes(), random.Random(seed)
    found = {"flips": many, "silent": 0, "refused": 0}
    for _ in range(many):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        step = _step_of(way, folder)
        found["refused"] += step is None
        found["silent"] += step is not None and step != 3
    return found


def coded_state(weights: list[Tensor], codes: dict[str, Tensor]) -> State:
    """What is saved where moments are in codes: weights as they are, and codes."""
    return {f"w{number}": tensor for number, tensor in enumerate(weights)} | codes

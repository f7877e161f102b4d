"""Seconds of a streamed step by a trial: the same trainer with few layers, at two depths, and a line through both.

A layer computed alone lies in a cache, and a drive tried alone has nothing else to do. In a trial layers come cold and
the drive reads while it writes; the threads, the small transfers and the ends of a step are in it. Its files are small,
though, and may lie in a drive's own memory.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tq.systems.tiers import Streamed
from tq.train.crew import die_with_parent
from tq.train.model.corpus import Corpus
from tq.train.stream.forecast import Run, measure, step_model
from tq.train.stream.trainer import StreamedTrainer

PREFIX = "tq-trial-"  # of its folder
MORE = (2, 6)  # layers of both depths, beside those that stay in memory
LEAST, MOST = 3, 24  # steps at each depth


@dataclass(frozen=True)
class Trial:
    """Seconds of a step at each of two depths (layers), or of one where the model has no more layers."""

    depths: tuple[int, ...]
    seconds: tuple[float, ...]

    def step_s(self, layers: int) -> float:
        """Seconds of a step of so many layers, on the line through both."""
        if len(self.depths) == 1:
            return self.seconds[0]
        (few, many), (short, long) = self.depths, self.seconds
        return short + (layers - few) * max(0.0, long - short) / (many - few)


def depths(run: Run) -> tuple[int, ...]:
    """Layers of a trial."""
    return tuple(sorted({min(run.model.layers, run.resident + more) for more in MORE}))


def trial(run: Run, seconds: float = 3.0) -> Trial:
    """Trains the first layers of a run on tokens of no meaning, in a folder of its own below the run's.

    Args:
        run: what is asked for.
        seconds: after which a depth is given no more steps, if it had 3; at most 24. Those of the first third do not
            count.
    Raises:
        ValueError, OSError: as ``StreamedTrainer``.
    """
    for stopped in [] if run.place is None else run.place.glob(PREFIX + "*"):
        shutil.rmtree(stopped, ignore_errors=True)
    found = []
    for layers in depths(run):
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=run.place) as folder:
            found.append(_steps(run, layers, None if run.place is None else Path(folder), seconds))
    return Trial(depths(run), tuple(found))


def _steps(run: Run, layers: int, place: Path | None, seconds: float) -> float:
    took: list[float] = []
    config = replace(run.config, steps=MOST, warmup=None, lr=1e-9)  # tokens of no meaning must not make it diverge
    with StreamedTrainer(
        replace(run.model, layers=layers), _tokens(run), config, place, state=run.state, inputs=run.inputs,
        clip=run.clip, resumable=run.resumable, resident=run.resident, loss_tokens=run.loss_tokens, impl=run.impl,
    ) as trainer:  # fmt: skip
        began = time.perf_counter()
        while len(took) < LEAST or (len(took) < MOST and time.perf_counter() - began < seconds):
            trainer.step()
            assert trainer.work is not None
            took.append(trainer.work.seconds)
    return statistics.median(took[len(took) // 3 :])


def _tokens(run: Run) -> Corpus:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.uint8 if run.model.vocab <= 256 else torch.int32
    tokens = torch.randint(0, run.model.vocab, (4 * run.seq + 2,), generator=generator).to(dtype)
    return Corpus("trial", "bytes", run.model.vocab, tokens, tokens, "", len(tokens), len(tokens))


@dataclass(frozen=True)
class Forecast:
    """Of a run: its step by arithmetic, and the trial of it; None where it would have taken too long, or failed."""

    run: Run
    step: Streamed
    trial: Trial | None

    @property
    def step_s(self) -> float:
        """Seconds of a step: by the trial where there is one."""
        return self.step.seconds() if self.trial is None else self.trial.step_s(self.run.model.layers)


def forecast(run: Run, most_s: float = 60.0) -> Forecast:
    """One layer and the drive are measured, and a trial follows unless it would take longer than ``most_s``.

    All of it in a process of its own, so that nothing stays behind in the memory of this one.

    Raises:
        ValueError, OSError: as ``StreamedTrainer``, or the process was ended.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_apart, args=(run, most_s, torch.get_num_threads(), os.getpid(), there))
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = ChildProcessError("the system ended the trial of a step; there may be too little memory for it")
    process.join()
    if isinstance(found, BaseException):
        raise found
    assert isinstance(found, Forecast)
    return found


def _apart(run: Run, most_s: float, threads: int, parent: int, there: Connection) -> None:
    if sys.platform == "linux":
        die_with_parent(parent)
    torch.set_num_threads(threads)
    try:
        step = step_model(run, measure(run))
    except (ValueError, OSError) as error:
        there.send(error)
        return
    ends = LEAST * len(depths(run)) * step.ends_s
    tried = None
    if ends + LEAST * sum(depths(run)) * step.seconds() / run.model.layers <= most_s:
        with suppress(OSError, RuntimeError, MemoryError):  # no room beside the run: the arithmetic remains
            tried = trial(run)
    there.send(Forecast(run, step, tried))

"""Groups in which something is wrong: how long until every rank is told, in trials with ranks forked for each.

A group takes ``EXACT`` steps with exact sums, as at the start of a training, and quantizes from then on. The rank that
is wrong, the step and the moment at which it dies are drawn, so that both kinds of steps are met.

``python -m tq.lab.stacks.failures --trials 50`` prints a line of JSON for each trial.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import tq.backend
import tq.backend.group
from tq.quant.codec import Codec
from tq.train.hooks import HookState, ddp_hook

RANKS = 3
PATIENCE_S = 60.0  # after something is wrong: a trial then counts as one that hangs
START_S = 600.0  # until something is wrong: kernels that no cache holds are compiled in the first quantized step
EXACT = 10  # first steps with exact sums; twice as many are taken, or more where a rank is to die
MOMENT_S = 0.005  # a kill comes within this time after a step, wherever the rank is then


@dataclass
class Trial:
    """One rank's part in a broken group.

    Attributes:
        wrong: whether it is the one that is wrong.
        at: step after which it dies, from 0 on, or its number of exact steps.
        moment_s: seconds from the end of that step to the kill.
        tell: writes down that something is wrong from now on.
        done: steps that it has taken.
    """

    wrong: bool
    at: int
    moment_s: float
    tell: Callable[[], None]
    done: int = 0

    def take(self, step: Callable[[], object], steps: int = 2 * EXACT) -> None:
        for _ in range(steps):
            step()
            self.done += 1

    def die(self) -> None:
        """Soon, and wherever this rank is then."""
        self.tell()
        threading.Timer(self.moment_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _on_the_backend(codec: Codec) -> Callable[[], object]:
    """A step of an optimizer on a group of the backend."""
    tq.backend.configure(tq.backend.Config(codec, warmup=EXACT))
    dist.init_process_group("tq")
    weight = torch.zeros(10_000, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)  # its steps are what the backend counts

    def step() -> None:
        weight.grad = torch.ones(10_000)
        dist.all_reduce(weight.grad)
        optimizer.step()

    return step


def _hooked(state: HookState) -> Callable[[], object]:
    """A backward pass of a replica with the hook."""
    model = DistributedDataParallel(nn.Linear(100, 100))
    model.register_comm_hook(state, ddp_hook)

    def step() -> None:
        model(torch.ones(2, 100)).sum().backward()

    return step


def rank_dies(trial: Trial) -> None:
    """One rank of the backend is killed, in a sum or between two."""
    step = _on_the_backend(Codec(bits=4))
    trial.take(step, trial.at)
    if trial.wrong:
        trial.die()
    trial.take(step, 10_000)


def two_codecs(trial: Trial) -> None:
    """One rank's backend has other settings."""
    trial.tell()
    trial.take(_on_the_backend(Codec(bits=3 if trial.wrong else 4)))


def two_versions(trial: Trial) -> None:
    """One rank's backend speaks another protocol."""
    tq.backend.group._PROTOCOL += trial.wrong
    trial.tell()
    trial.take(_on_the_backend(Codec(bits=4)))


def two_hooks(trial: Trial) -> None:
    """One rank's hook has another codec, which exact steps do not use."""
    dist.init_process_group("gloo")
    step = _hooked(HookState(Codec(bits=3 if trial.wrong else 4), warmup=EXACT))
    trial.tell()
    trial.take(step)


def two_warmups(trial: Trial) -> None:
    """One rank's hook takes one exact step more."""
    dist.init_process_group("gloo")
    step = _hooked(HookState(Codec(bits=4), warmup=trial.at + trial.wrong))
    trial.tell()
    trial.take(step, trial.at + EXACT)


def hook_dies(trial: Trial) -> None:
    """One rank with the hook is killed, anywhere in a step."""
    dist.init_process_group("gloo")
    step = _hooked(HookState(Codec(bits=4), warmup=EXACT))
    trial.take(step, trial.at)
    if trial.wrong:
        trial.die()
    trial.take(step, 10_000)


KINDS = {kind.__name__: kind for kind in (rank_dies, two_codecs, two_versions, two_hooks, two_warmups, hook_dies)}
DEATHS = ("rank_dies", "hook_dies")


def _rank(rank: int, kind: str, wrong: int, at: int, moment_s: float, folder: str) -> None:
    """Writes when something went wrong, and when, after how many steps and of what this rank was told."""
    torch.set_num_threads(1)
    port = (Path(folder) / "port").read_text()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    def write(name: str, **said: Any) -> None:
        (Path(folder) / f"{name}-{rank}").write_text(json.dumps({"at": time.time(), **said}))

    trial = Trial(rank == wrong, at, moment_s, lambda: write("wrong"))
    try:
        KINDS[kind](trial)
        write("told", error=None, done=trial.done)
    except Exception as error:  # noqa: BLE001
        write("told", error=f"{type(error).__name__}: {error}", done=trial.done)
    os._exit(0)  # what is left of a broken group is not waited for


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() and path.read_text() else None


def drawn(kind: str, seed: int) -> tuple[int, int, float]:
    """(the rank that is wrong, the step, seconds from it to a kill) of a trial."""
    generator = random.Random(f"{kind}-{seed}")
    return generator.randrange(RANKS), generator.randrange(2 * EXACT), generator.uniform(0, MOMENT_S)


def trial(kind: str, seed: int) -> dict[str, Any]:
    """One group.

    Args:
        kind: of ``KINDS``.
        seed: draws the rank that is wrong, the step and the moment.

    Returns:
        told: how many of the other ranks got an error; s: seconds from what was wrong to the last error; errors: as the
        ranks had them; at: the step drawn; steps: [told], that each had taken; exact: whether those that were told
        failed in exact ones.
    """
    wrong, at, moment_s = drawn(kind, seed)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "port").write_text(str(_free_port()))
        given = (kind, wrong, at, moment_s, folder)
        context = mp.start_processes(_rank, given, nprocs=RANKS, join=False, start_method="fork")
        began = _wait(Path(folder), context.processes)
        others = [rank for rank in range(RANKS) if not (kind in DEATHS and rank == wrong)]
        told = [found for rank in others if (found := _read(Path(folder) / f"told-{rank}")) and found["error"]]
    seconds = max((each["at"] for each in told), default=float("nan")) - max(began, default=float("nan"))
    errors = sorted({each["error"].splitlines()[0][:200] for each in told})
    steps = [each["done"] for each in told]
    return {
        "kind": kind, "seed": seed, "asked": len(others), "told": len(told), "s": seconds, "errors": errors,
        "at": at, "steps": steps, "exact": bool(steps) and max(steps) < EXACT,
    }  # fmt: skip


def _wait(folder: Path, ranks: Sequence[Any]) -> list[float]:
    """When something was wrong, of the ranks that said so, once all processes have ended or ``PATIENCE_S`` is over."""
    started, began = time.time(), []
    while any(rank.is_alive() for rank in ranks):
        time.sleep(0.02)
        began = [found["at"] for rank in range(RANKS) if (found := _read(folder / f"wrong-{rank}"))]
        if time.time() > (max(began) + PATIENCE_S if began else started + START_S):
            break
    for rank in ranks:
        rank.kill()
        rank.join()
    return [found["at"] for rank in range(RANKS) if (found := _read(folder / f"wrong-{rank}"))]


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tq.lab.stacks.failures", description=__doc__)
    parser.add_argument("--trials", type=int, default=len(KINDS), help="dealt out to the kinds in turn (default: 6)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial (default: 0)")
    given = parser.parse_args(argv)
    for number in tqdm(range(given.trials), desc="groups", disable=None):
        print(json.dumps(trial(given.kinds[number % len(given.kinds)], given.seed + number)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Groups in which something is wrong: how long until every rank is told, in trials with ranks forked for each.

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
import time
from collections.abc import Callable
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
PATIENCE_S = 60.0  # after it a trial counts as one that hangs
Tell = Callable[[], None]


def _sums(steps: int = 1000) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(10_000))


def rank_dies(wrong: bool, at: int, tell: Tell) -> None:
    """One rank is killed between two collectives."""
    dist.init_process_group("tq")
    _sums(at)
    if wrong:
        tell()
        os.kill(os.getpid(), signal.SIGKILL)
    _sums()


def two_codecs(wrong: bool, at: int, tell: Tell) -> None:
    """One rank's backend has other settings."""
    tq.backend.configure(tq.backend.Config(Codec(bits=3 if wrong else 4)))
    tell()
    dist.init_process_group("tq")
    _sums(at)


def two_versions(wrong: bool, at: int, tell: Tell) -> None:
    """One rank's backend speaks another protocol."""
    tq.backend.group._PROTOCOL += wrong
    tell()
    dist.init_process_group("tq")
    _sums(at)


def two_hooks(wrong: bool, at: int, tell: Tell) -> None:
    """One rank's hook has another codec."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(100, 100))
    model.register_comm_hook(HookState(Codec(bits=3 if wrong else 4), warmup=0), ddp_hook)
    tell()
    for _ in range(1 + at):
        model(torch.ones(2, 100)).sum().backward()


KINDS = {kind.__name__: kind for kind in (rank_dies, two_codecs, two_versions, two_hooks)}


def _rank(rank: int, kind: str, wrong: int, at: int, folder: str) -> None:
    """Writes when something went wrong, and when and what this rank was told."""
    torch.set_num_threads(1)
    port = (Path(folder) / "port").read_text()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    def write(name: str, **said: Any) -> None:
        (Path(folder) / f"{name}-{rank}").write_text(json.dumps({"at": time.time(), **said}))

    try:
        KINDS[kind](rank == wrong, at, lambda: write("wrong"))
        write("told", error=None)
    except Exception as error:  # noqa: BLE001
        write("told", error=f"{type(error).__name__}: {error}")
    os._exit(0)  # what is left of a broken group is not waited for


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() and path.read_text() else None


def trial(kind: str, seed: int) -> dict[str, Any]:
    """One group.

    Args:
        kind: of ``KINDS``.
        seed: chooses the rank that is wrong, and after how many collectives.

    Returns:
        told: how many of the other ranks got an error; s: seconds from what was wrong to the last error; errors: as the
        ranks had them.
    """
    drawn = random.Random(f"{kind}-{seed}")
    wrong, at = drawn.randrange(RANKS), drawn.randrange(5)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "port").write_text(str(_free_port()))
        context = mp.start_processes(_rank, (kind, wrong, at, folder), nprocs=RANKS, join=False, start_method="fork")
        deadline = time.monotonic() + PATIENCE_S
        for process in context.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        began = [found["at"] for rank in range(RANKS) if (found := _read(Path(folder) / f"wrong-{rank}"))]
        others = [rank for rank in range(RANKS) if not (kind == "rank_dies" and rank == wrong)]
        told = [found for rank in others if (found := _read(Path(folder) / f"told-{rank}")) and found["error"]]
    seconds = max((each["at"] for each in told), default=float("nan")) - max(began, default=float("nan"))
    errors = sorted({each["error"].splitlines()[0][:200] for each in told})
    return {"kind": kind, "seed": seed, "asked": len(others), "told": len(told), "s": seconds, "errors": errors}


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tq.lab.stacks.failures", description=__doc__)
    parser.add_argument("--trials", type=int, default=len(KINDS), help="dealt out to the kinds in turn (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial (default: 0)")
    given = parser.parse_args(argv)
    kinds = list(KINDS)
    for number in tqdm(range(given.trials), desc="groups", disable=None):
        print(json.dumps(trial(kinds[number % len(kinds)], given.seed + number)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How processes of the backend end: fresh interpreters that sum a little and are then at their end, in several ways.

``python -m tq.lab.stacks.exits --runs 200`` prints a line of JSON for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import tq.backend  # noqa: F401
from tq.quant.codec import Codec
from tq.train.hooks import HookState, ddp_hook

RANKS = 2
PATIENCE_S = 120.0  # after it a run counts as one that hangs
MEET = "TQ_EXITS_MEET"  # where ranks meet, an init_method
_kept: list[Any] = []


def _begin(backend: str) -> None:
    dist.init_process_group(backend, os.environ[MEET])


def _sum(async_op: bool = False) -> Any:
    return dist.all_reduce(torch.ones(100_000), async_op=async_op)


def destroyed() -> None:
    """The group is destroyed, as it should be."""
    _begin("tq")
    _sum()
    dist.destroy_process_group()


def left() -> None:
    """The group is still there."""
    _begin("tq")
    _sum()


def under_way() -> None:
    """A sum is under way that nobody waits for."""
    _begin("tq")
    _sum()
    _kept.append(_sum(async_op=True))


def hooked() -> None:
    """The group, and a replica with the hook, are still there."""
    _begin("gloo")
    model = DistributedDataParallel(nn.Linear(300, 300))
    model.register_comm_hook(HookState(Codec(4), warmup=0), ddp_hook)
    model(torch.ones(2, 300)).sum().backward()
    _kept.append(model)


KINDS: dict[str, Callable[[], None]] = {kind.__name__: kind for kind in (destroyed, left, under_way, hooked)}


def run(kind: str) -> dict[str, Any]:
    """One group of fresh interpreters.

    Args:
        kind: of ``KINDS``.

    Returns:
        kind; codes: what each rank ended with, None where it had to be killed; said: ends of their standard errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        base = {**os.environ, "OMP_NUM_THREADS": "1", "TQ_WARMUP": "0"}
        meet = f"file://{folder}/store?world_size={RANKS}&rank="
        argv = [sys.executable, "-m", "tq.lab.stacks.exits", "--rank-of", kind]
        outputs = [Path(folder) / f"said-{rank}" for rank in range(RANKS)]
        processes = []
        for rank, output in enumerate(outputs):
            with open(output, "w") as file:
                processes.append(subprocess.Popen(argv, env={**base, MEET: f"{meet}{rank}"}, stderr=file))
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(PATIENCE_S))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        return {"kind": kind, "codes": codes, "said": [output.read_text()[-500:] for output in outputs]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tq.lab.stacks.exits", description=__doc__)
    parser.add_argument("--runs", type=int, default=len(KINDS), help="dealt out to the kinds in turn (default: 4)")
    parser.add_argument("--rank-of", choices=KINDS, help="be a rank of one run; how ranks meet is in the environment")
    given = parser.parse_args(argv)
    if given.rank_of:
        KINDS[given.rank_of]()
        return 0
    kinds = list(KINDS)
    for number in tqdm(range(given.runs), desc="runs", disable=None):
        print(json.dumps(run(kinds[number % len(kinds)])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

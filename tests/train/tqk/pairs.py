"""Ranks that keep each other's state, of which some hosts are lost: python pairs.py FOLDER RANKS LOST,..."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tq.train.tqk.peers import PeerMemory

DIES_AT = 7


def state_of(rank: int, step: int) -> dict:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {"w": torch.randn(200, 100, generator=generator), "step": step, "rank": rank}


def start(rank: int, folder: str, ranks: int, name: str) -> PeerMemory:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{name}", ranks), rank=rank, world_size=ranks)
    return PeerMemory(f"{folder}/host-{rank}", threads=1)


def train(rank: int, folder: str, ranks: int) -> None:
    """Saves every step, until all are killed in the middle of one."""
    memory = start(rank, folder, ranks, "first")
    for step in range(1, DIES_AT + 3):
        if step == DIES_AT and rank == 0:
            Path(folder, "killed").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        memory.save(step, state_of(rank, step))


def resume(rank: int, folder: str, ranks: int) -> None:
    memory = start(rank, folder, ranks, "second")
    found = memory.load()
    told = {"step": None}
    if found is not None:
        step, state = found
        told = {"step": step, "right": torch.equal(state["w"], state_of(rank, step)["w"]), "rank": state["rank"]}
    Path(folder, f"found-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, ranks, lost = sys.argv[1], int(sys.argv[2]), [int(host) for host in sys.argv[3].split(",") if host]
    torch.set_num_threads(1)
    try:
        mp.start_processes(train, (folder, ranks), nprocs=ranks, start_method="fork")
    except Exception as error:
        print("as wanted:", type(error).__name__)
    for host in lost:
        shutil.rmtree(f"{folder}/host-{host}")
    mp.start_processes(resume, (folder, ranks), nprocs=ranks, start_method="fork")

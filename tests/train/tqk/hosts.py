"""A worker of torchrun on its own host, which keeps its state at a partner: hosts.py FOLDER STEPS DEATHS

DEATHS names the steps before which hosts are lost with their memory, and whose: "7:0,13:2+3" loses the host of rank 0
before step 7 and those of ranks 2 and 3 before step 13. What each worker resumes from is a line of FOLDER/resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tq.train.tqk import Checkpoints
from tq.train.tqk.peers import PeerMemory

EVERY = 5  # steps from one checkpoint on the disk to the next


def address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((os.environ["MASTER_ADDR"], 1))
        return asked.getsockname()[0]


def after(rank: int, steps: int) -> torch.Tensor:
    """What a rank has after so many steps: each adds a mean over all ranks and something of its own."""
    ranks = dist.get_world_size()
    mean = sum(range(1, ranks + 1)) / ranks
    return torch.full((500,), sum(step * mean + (step * rank) % 7 for step in range(1, steps + 1)), dtype=torch.float64)


def resumed(memory: PeerMemory, disk: Checkpoints) -> tuple[str, int, torch.Tensor]:
    found = memory.load()
    if found is not None:
        return "peer", found[0], found[1]["w"]
    if disk.steps():
        state = disk.load()
        return "disk", state["step"], state["w"]
    return "start", 0, torch.zeros(500, dtype=torch.float64)


def die_if_told(folder: Path, step: int, deaths: dict[int, list[int]]) -> None:
    """Hosts take their memory along. Each death happens once."""
    rank, lost = dist.get_rank(), deaths.get(step, [])
    dist.barrier()
    if rank in lost and not (folder / f"died-{step}-{rank}").exists():
        (folder / f"died-{step}-{rank}").write_text("")
        shutil.rmtree(folder / f"host-{address()}")
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, steps: int, deaths: dict[int, list[int]]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    memory = PeerMemory(folder / f"host-{address()}", threads=1)
    disk = Checkpoints(folder / "disk", group=dist.group.WORLD, threads=1)
    source, step, w = resumed(memory, disk)
    told = {"rank": rank, "source": source, "step": step, "right": torch.equal(w, after(rank, step))}
    with open(folder / "resumed", "a") as file:
        file.write(json.dumps(told) + "\n")
    for now in range(step + 1, steps + 1):
        die_if_told(folder, now, deaths)
        sent = torch.full((500,), now * (rank + 1.0), dtype=torch.float64)
        dist.all_reduce(sent)
        w += sent / dist.get_world_size() + (now * rank) % 7
        memory.save(now, {"w": w, "step": now})
        if now % EVERY == 0:
            disk.save(now, {"w": w, "step": now})
    dist.barrier()
    (folder / f"done-{rank}").write_text(str(torch.equal(w, after(rank, steps))))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    said = [death.split(":") for death in sys.argv[3].split(",")]
    main(Path(sys.argv[1]), int(sys.argv[2]), {int(at): [int(one) for one in who.split("+")] for at, who in said})

"""torchrun's elastic agents: workers that start anew on whatever hosts there are, and go on from a checkpoint."""

import json
import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tq.backend
from tq.lab.stacks.task import OUT, Task
from tq.train.tqk import Checkpoints

EVERY = 5  # steps from one checkpoint to the next
task, folder = Task.asked(), Path(os.environ[OUT])
dist.init_process_group(task.backend)
seed = task.seeds[0]
model = DistributedDataParallel(task.model(seed))
optimizer = task.optimizer(model.parameters())
saved, first = Checkpoints(folder / "saved"), 0
if saved.steps():  # weights, optimizer, and how many codes were drawn: seeds do not repeat
    state = saved.load()
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    tq.backend.load_state_dict(state["codec"])
    first = state["step"]

for step, (ids, targets) in enumerate(task.batches(seed, first), first + 1):
    optimizer.zero_grad()
    model(ids, targets).backward()
    optimizer.step()
    calls = sum(tq.backend.state_dict().values())
    told = {"at": time.time(), "rank": task.rank, "ranks": task.ranks, "step": step, "calls": calls}
    with open(folder / "steps", "a") as file:
        file.write(json.dumps({**told, "weights": task.digest(model.parameters())}) + "\n")
    if task.rank == 0 and step % EVERY == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        saved.save(step, {**state, "codec": tq.backend.state_dict(), "step": step})
    if (folder / "stop").exists() and step % EVERY == 0:
        break
dist.destroy_process_group()

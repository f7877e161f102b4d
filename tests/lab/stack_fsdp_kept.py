"""FSDP2's program with a distributed checkpoint of PyTorch after a step, what selects the seeds among its values.

Options: folder: of the checkpoint; save, resume: steps before it.
"""

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tq.backend
from tq.lab.stacks.task import Task

task = Task.asked()
folder, save_at, resume_at = (task.options.get(name) for name in ("folder", "save", "resume"))
dist.init_process_group(task.backend)
model = task.model(0)
for unit in (*model.gpt.blocks, model):
    fully_shard(unit)
optimizer = task.optimizer(model.parameters())


def state() -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "seeds": tq.backend.state_dict()}


if resume_at:
    kept = state()
    dcp.load(kept, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
    tq.backend.load_state_dict(kept["seeds"])
for step, (ids, targets) in enumerate(task.batches(0, resume_at or 0), (resume_at or 0) + 1):
    optimizer.zero_grad()
    model(ids, targets).backward()
    optimizer.step()
    task.stepped()
    if step == save_at:
        dcp.save(state(), checkpoint_id=folder)
whole = (each.full_tensor() for each in model.parameters() if isinstance(each, DTensor))
task.ended(0, model, whole, shards=model.parameters())
task.close()
dist.destroy_process_group()

"""PyTorch's FSDP2: the name of the backend, or a reduce-scatter of its own."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tq.backend  # noqa: F401
from tq.lab.stacks.task import Task
from tq.train.hooks import ReduceScatter

task = Task.asked()
dist.init_process_group(task.backend)
policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if task.way == "bf16" else None)  # 16 bits, to compare

for seed in task.seeds:
    model = task.model(seed)
    units = *model.gpt.blocks, model
    scatter = ReduceScatter(task.codec, warmup=task.warmup * len(units))
    for unit in units:
        fully_shard(unit, mp_policy=policy)
        if task.way == "hook":
            unit.set_custom_reduce_scatter(scatter)
    optimizer = task.optimizer(model.parameters())
    for ids, targets in task.batches(seed):
        optimizer.zero_grad()
        model(ids, targets).backward()
        optimizer.step()
        task.stepped()
    whole = (each.full_tensor() for each in model.parameters() if isinstance(each, DTensor))
    task.ended(seed, model, whole, shards=model.parameters())

task.close()
dist.destroy_process_group()

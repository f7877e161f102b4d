"""PyTorch's DistributedDataParallel: the name of the backend, or a hook."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tq.backend  # noqa: F401
from tq.lab.net.workloads import bf16
from tq.lab.stacks.task import Task
from tq.train.hooks import HookState, ddp_hook

task = Task.asked()
dist.init_process_group(task.backend)  # "tq", or "gloo" to compare

for seed in task.seeds:
    model = DistributedDataParallel(task.model(seed), bucket_cap_mb=0.5)
    if task.way == "hook":
        model.register_comm_hook(HookState(task.codec, warmup=task.warmup), ddp_hook)
    elif task.way == "bf16":  # PyTorch's own hook, to compare
        model.register_comm_hook(None, bf16)
    optimizer = task.optimizer(model.parameters())
    for ids, targets in task.batches(seed):
        optimizer.zero_grad()
        model(ids, targets).backward()
        optimizer.step()
        task.stepped()
    task.ended(seed, model.module, model.parameters())

task.close()
dist.destroy_process_group()

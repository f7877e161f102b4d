"""Accelerate: a process group of this backend before its own, or a hook."""

import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.utils.data import DataLoader

import tq.backend
from tq.lab.stacks.task import Task
from tq.train.hooks import HookState, ddp_hook

task = Task.asked()
dist.init_process_group(task.backend)  # on CPUs Accelerate refuses InitProcessGroupKwargs(backend="tq")
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**task.options.get("ddp", {}))])
save_at, resume_at, folder = (task.options.get(name) for name in ("save", "resume", "folder"))

for seed in task.seeds:
    made, state = task.model(seed), HookState(task.codec, warmup=task.warmup)
    batches = DataLoader(task.dataset(seed), task.share)
    model, optimizer, batches = accelerator.prepare(made, task.optimizer(made.parameters()), batches)
    if task.way == "hook":
        model.register_comm_hook(state, ddp_hook)
    accelerator.register_for_checkpointing(state if task.way == "hook" else tq.backend)  # what selects the seeds
    if resume_at:
        accelerator.load_state(folder)
        batches = accelerator.skip_first_batches(batches, resume_at)
    for step, (ids, targets) in enumerate(batches, 1):
        optimizer.zero_grad()
        accelerator.backward(model(ids, targets))
        optimizer.step()
        task.stepped()
        if step == save_at:
            accelerator.save_state(folder)
    task.ended(seed, made, made.parameters())

task.close()
dist.destroy_process_group()

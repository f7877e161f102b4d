"""Megatron-core's DistributedDataParallel, its buckets and their overlap: a data-parallel group of the backend.

Training with Megatron needs CUDA. Its buckets need it only to learn where to put their memory: they ask
``torch.cuda.current_device()`` for a device, and a CPU is one. Nothing else of them is changed.
"""

from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

import tq.backend  # noqa: F401
from tq.lab.stacks.task import Task

task = Task.asked()
dist.init_process_group("gloo")
alone = [dist.new_group([rank]) for rank in range(task.ranks)][task.rank]
groups = ProcessGroupCollection()
groups.dp = dist.new_group(backend=task.backend)  # gradients only: activations of tensor parallelism stay as they are
groups.tp = groups.pp = groups.ep = groups.expt_dp = alone
shape = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)  # asked for no more than its settings

for seed in task.seeds:
    asked = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=100_000)
    with mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        model = DistributedDataParallel(shape, asked, task.model(seed), pg_collection=groups)
    model.broadcast_params()
    optimizer = task.optimizer(model.parameters())
    for ids, targets in task.batches(seed):
        model.zero_grad_buffer()
        model(ids, targets).backward()
        model.finish_grad_sync()
        for each in model.parameters():
            each.grad = each.main_grad
        optimizer.step()
        optimizer.zero_grad()
        task.stepped()
    task.ended(seed, model.module, model.parameters())

task.close()
dist.destroy_process_group()

"""DeepSpeed's ZeRO, stages 0 to 3 (option "stage"): the name of the backend."""

import deepspeed
import torch.distributed as dist

import tq.backend  # noqa: F401
from tq.lab.stacks.task import Task

# Only inference uses this one, and without a GPU it would be compiled at every first start.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

task = Task.asked()
deepspeed.init_distributed(task.backend, verbose=False)

for seed in task.seeds:
    model = task.model(seed)
    # Stage 3 pads a tensor to a multiple of the ranks with memory that nobody wrote, any number at all: harmless in a
    # sum, but a code shares one scale among its block. An all-reduce, of which each keeps its part, has no padding.
    even = all(each.numel() % task.ranks == 0 for each in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": task.share,
        "gradient_clipping": 0.0,  # its default is a norm of 1
        "zero_optimization": {"stage": 3, "reduce_scatter": even, **task.options},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=task.optimizer(model.parameters()), config=config)
    for ids, targets in task.batches(seed):
        engine.backward(engine(ids, targets))
        engine.step()
        task.stepped()
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):  # of which stage 3 keeps a part on each rank
        whole = [each.detach().clone() for each in parameters]
    task.ended(seed, engine, whole, shards=parameters)
    engine.destroy()

task.close()
dist.destroy_process_group()

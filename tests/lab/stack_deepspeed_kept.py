"""DeepSpeed's program with its own checkpoint after a step, in which what selects the seeds is the client's state.

Options: folder: of the checkpoint; save, resume: steps before it; stage: of ZeRO.
"""

import deepspeed
import torch.distributed as dist

import tq.backend
from tq.lab.stacks.task import Task

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

task = Task.asked()
stage, folder, save_at, resume_at = (task.options.get(name) for name in ("stage", "folder", "save", "resume"))
deepspeed.init_distributed(task.backend, verbose=False)
model = task.model(0)
config = {
    "train_micro_batch_size_per_gpu": task.share, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, optimizer=task.optimizer(model.parameters()), config=config)
if resume_at:
    _, kept = engine.load_checkpoint(folder)
    tq.backend.load_state_dict(kept["seeds"])
for step, (ids, targets) in enumerate(task.batches(0, resume_at or 0), (resume_at or 0) + 1):
    engine.backward(engine(ids, targets))
    engine.step()
    task.stepped()
    if step == save_at:
        engine.save_checkpoint(folder, client_state={"seeds": tq.backend.state_dict()})
parameters = list(model.parameters())
with deepspeed.zero.GatheredParameters(parameters):
    whole = [each.detach().clone() for each in parameters]
task.ended(0, engine, whole, shards=parameters)
engine.destroy()
task.close()
dist.destroy_process_group()

"""torchtitan's FSDP2: its ``apply_fsdp_to_decoder`` on the book's model; the name of the backend, or a reduce-scatter.

Its trainer and its meshes want an accelerator (trainer.py:301, distributed/parallel_dims.py:281 of 0.3.0); what shards
a model does not. To the trainer ``torch.distributed.Backend.default_device_backend_map["cuda"] = "tq"`` would name the
backend (distributed/utils.py:514); that was read, not run.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

import tq.backend  # noqa: F401
from tq.lab.stacks.task import Learner, Task
from tq.train.hooks import ReduceScatter


class Decoder(Learner):
    """The parts of the model under the names that torchtitan gives them."""

    enable_weight_tying = True

    @property
    def tok_embeddings(self) -> nn.Module:
        return self.gpt.embed

    @property
    def norm(self) -> nn.Module:
        return self.gpt.final_norm

    @property
    def lm_head(self) -> nn.Module:
        return self.gpt.head

    @property
    def layers(self) -> dict[str, nn.Module]:
        return {str(number): block for number, block in enumerate(self.gpt.blocks)}


task = Task.asked()
dist.init_process_group(task.backend)
mesh = init_device_mesh("cpu", (task.ranks,), mesh_dim_names=("fsdp",))

for seed in task.seeds:
    model = Decoder(task.preset, seed)
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    scatter = ReduceScatter(task.codec, warmup=task.warmup * len(units))
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)  # else its sums are NCCL's PREMUL_SUM, which is not coded
        if task.way == "hook":
            unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    optimizer = task.optimizer(model.parameters())
    for ids, targets in task.batches(seed):
        optimizer.zero_grad()
        (model(ids, targets) / task.ranks).backward()  # it sums gradients: a mean over tokens is the loss's
        optimizer.step()
        task.stepped()
    whole = (each.full_tensor() for each in model.parameters() if isinstance(each, DTensor))
    task.ended(seed, model, whole, shards=model.parameters())

task.close()
dist.destroy_process_group()

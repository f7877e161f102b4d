"""Lightning's programs with checkpoints after each of two epochs, in which what selects the seeds is kept too.

Options: sharded: FSDP2; folder: of the checkpoints; resume: one of them.
"""

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

import tq.backend
from tq.lab.stacks.task import Task
from tq.lab.stacks.with_lightning import Module, trainer
from tq.lab.stacks.with_lightning_fsdp import Sharded
from tq.train.hooks import HookState, ReduceScatter


class Kept(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        calls = {name: calls for name, calls in tq.backend.state_dict().items() if calls}  # of groups with all ranks
        checkpoint["codes"] = self.state.state_dict(), calls

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.state.load_state_dict(checkpoint["codes"][0])
        tq.backend.load_state_dict(checkpoint["codes"][1])


class KeptSharded(Kept, Sharded):
    pass


if __name__ == "__main__":
    task = Task.asked()
    if task.options["sharded"]:
        module = KeptSharded(task, 0, ReduceScatter(task.codec, warmup=0))
        strategy = ModelParallelStrategy(task.ranks, 1, process_group_backend=task.backend)
    else:  # buckets cut anew after the first step would not be those of a run that goes on
        module = Kept(task, 0, HookState(task.codec, warmup=task.warmup))
        strategy = DDPStrategy(
            process_group_backend=task.backend, bucket_cap_mb=0.5, find_unused_parameters=True
        )
    kept = ModelCheckpoint(task.options.get("folder"), "{step}", save_top_k=-1)
    trainer(
        task, strategy, max_epochs=2, limit_train_batches=task.steps // 2, reload_dataloaders_every_n_epochs=1,
        enable_checkpointing="folder" in task.options, callbacks=[kept] if "folder" in task.options else [],
    ).fit(module, ckpt_path=task.options.get("resume"))  # fmt: skip

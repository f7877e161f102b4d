"""Lightning's DDPStrategy: the name of the backend, or a hook."""

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

import tq.backend  # noqa: F401
from tq.lab.stacks.task import Task
from tq.train.hooks import HookState, ddp_hook


class Module(lightning.LightningModule):
    def __init__(self, task: Task, seed: int, state: Any) -> None:
        super().__init__()
        self.task, self.seed, self.state = task, seed, state
        self.net = task.model(seed)

    def setup(self, stage: str) -> None:
        os.environ.update(RANK=str(self.global_rank), WORLD_SIZE=str(self.trainer.world_size))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self.task.batches(self.seed, self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task.optimizer(self.parameters())

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.net(*batch)
        return loss

    def on_train_start(self) -> None:
        if self.task.way == "hook":  # Lightning registers its ddp_comm_hook on GPUs only
            self.trainer.strategy.model.register_comm_hook(self.state, ddp_hook)

    def on_train_batch_end(self, *_: object) -> None:
        self.task.stepped()

    def on_train_end(self) -> None:
        self.task.ended(self.seed, self.net, self.parameters())
        self.task.close(hooked=self.state.step)


def trainer(task: Task, strategy: Strategy, **more: Any) -> lightning.Trainer:
    """One that is quiet, and deals out no samples: its own sampler shuffles."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(
        accelerator="cpu", devices=devices, num_nodes=max(1, task.ranks // devices), strategy=strategy,
        use_distributed_sampler=False, **{"max_epochs": 1, **quiet, **more},
    )  # fmt: skip


def main(task: Task) -> None:
    for seed in task.seeds:
        method = task.options.get("start_method", "popen")  # where Lightning launches
        strategy = DDPStrategy(process_group_backend=task.backend, start_method=method, bucket_cap_mb=0.5)
        trainer(task, strategy).fit(Module(task, seed, HookState(task.codec, warmup=task.warmup)))


if __name__ == "__main__":
    main(Task.asked())

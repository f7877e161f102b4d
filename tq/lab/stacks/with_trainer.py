"""The Trainer of Hugging Face's transformers on GPT-2 of two layers: the backend's name, a hook, or the optimizer."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import tq.backend  # noqa: F401
from tq.lab.stacks.task import Task, Windows
from tq.train.hooks import HookState, ddp_hook
from tq.train.optim import TurboQuantAdamW

SHAPE = GPT2Config(
    vocab_size=256, n_positions=129, n_embd=128, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip


def labelled(ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Its models shift labels themselves: of one token more, the loss is that of ``targets``."""
    whole = torch.cat([ids, targets[..., -1:]], -1)
    return {"input_ids": whole, "labels": whole}


class Examples(Dataset[dict[str, Tensor]]):
    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return labelled(*self.windows[index])


class Coded(TrainerCallback):
    trainer: Trainer

    def __init__(self, task: Task) -> None:
        self.task, self.state = task, HookState(task.codec, warmup=task.warmup)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.task.way == "hook":
            self.trainer.model_wrapped.register_comm_hook(self.state, ddp_hook)
        elif self.task.way == "optimizer":  # it takes the mean itself
            self.trainer.model_wrapped.register_comm_hook(None, noop_hook)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.task.stepped()


def train(task: Task, seed: int, callback: Coded, resume: str | None = None, **more: Any) -> None:
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(SHAPE)
    optimizer = task.optimizer(model.parameters())
    if task.way == "optimizer":
        optimizer = TurboQuantAdamW(model.parameters(), lr=task.lr, codec=task.codec, warmup=task.warmup)
    arguments = TrainingArguments(
        use_cpu=True, per_device_train_batch_size=task.share, num_train_epochs=1, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", logging_strategy="no", report_to=[], disable_tqdm=True,
        ddp_broadcast_buffers=False, ddp_bucket_cap_mb=1,
        **{"save_strategy": "no", "ddp_find_unused_parameters": False, **more},  # Trainer's own choice is True
        max_grad_norm=0,  # before the optimizer's mean it would clip each rank's part: give max_norm to the optimizer
    )  # fmt: skip
    callback.trainer = Trainer(
        model, arguments, train_dataset=Examples(task.dataset(seed)), optimizers=(optimizer, None),
        callbacks=[callback],
    )  # fmt: skip
    callback.trainer.train(resume_from_checkpoint=resume)
    task.ended(seed, lambda ids, targets: model(**labelled(ids, targets)).loss, model.parameters())


if __name__ == "__main__":
    task = Task.asked()
    dist.init_process_group(task.backend)  # on CPUs Trainer refuses ddp_backend="tq"
    for seed in task.seeds:
        with tempfile.TemporaryDirectory() as folder:
            train(task, seed, Coded(task), output_dir=folder)
    task.close()
    dist.destroy_process_group()

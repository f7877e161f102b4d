"""The Trainer's program with its own checkpoints after every third step, and beside each what selects the seeds.

Options: folder: of the checkpoints; resume: one of them; arguments: of ``TrainingArguments``.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tq.backend
from tq.lab.stacks.task import Task
from tq.lab.stacks.with_trainer import Coded, train


class Kept(Coded):
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "codes.json"
            file.write_text(json.dumps([self.state.state_dict(), tq.backend.state_dict()]))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        if state.global_step:
            hook, backend = json.loads((Path(self.task.options["resume"]) / "codes.json").read_text())
            self.state.load_state_dict(hook)
            tq.backend.load_state_dict(backend)


if __name__ == "__main__":
    task = Task.asked()
    dist.init_process_group(task.backend)
    with tempfile.TemporaryDirectory() as folder:
        train(
            task, 0, Kept(task), task.options.get("resume"), output_dir=task.options.get("folder", folder),
            save_strategy="steps", save_steps=3, **task.options["arguments"],
        )  # fmt: skip
    task.close()
    dist.destroy_process_group()

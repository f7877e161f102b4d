"""Lightning's DDPStrategy called as its manual says, hook and state handed over; it starts its processes itself."""

import lightning
from lightning.pytorch.strategies import DDPStrategy

from tq.lab.stacks.task import Task
from tq.lab.stacks.with_lightning import Module
from tq.quant.codec import Codec
from tq.train.hooks import HookState, ddp_hook

if __name__ == "__main__":
    task = Task.asked()
    state = HookState(Codec())
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=DDPStrategy(
            ddp_comm_hook=ddp_hook, ddp_comm_state=state, start_method=task.options["start_method"]
        ),
    )  # fmt: skip
    trainer.fit(Module(task, 0, state))

"""Lightning's ModelParallelStrategy with FSDP2: the name of the backend, or a reduce-scatter of its own."""

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tq.lab.stacks.task import Task
from tq.lab.stacks.with_lightning import Module, trainer
from tq.train.hooks import ReduceScatter
from tq.train.model.gpt import PRESETS


class Sharded(Module):
    def configure_model(self) -> None:
        for unit in (*self.net.gpt.blocks, self.net):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])
            if self.task.way == "hook":
                unit.set_custom_reduce_scatter(self.state)

    def on_train_start(self) -> None:
        """There is no DDP to hook into."""

    def on_train_end(self) -> None:
        whole = (each.full_tensor() for each in self.parameters())
        self.task.ended(self.seed, self.net, whole, shards=self.parameters())
        self.task.close(hooked=self.state.step)


def main(task: Task) -> None:
    for seed in task.seeds:
        strategy = ModelParallelStrategy(
            data_parallel_size=task.ranks, tensor_parallel_size=1, process_group_backend=task.backend
        )
        scatter = ReduceScatter(task.codec, warmup=task.warmup * (PRESETS[task.preset].layers + 1))  # calls of a step
        trainer(task, strategy).fit(Sharded(task, seed, scatter))


if __name__ == "__main__":
    main(Task.asked())

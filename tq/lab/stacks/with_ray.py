"""Ray Train on this machine: the name of the backend, and a hook that makes it known to Ray's workers."""

import os
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from tq.lab.stacks.task import Task


def known() -> None:
    """Run at the start of each process of Ray's: it makes the process group before it looks at the user's code."""
    import tq.backend  # noqa: F401

    Task.asked()  # its settings


def train() -> None:
    task = Task.asked()
    for seed in task.seeds:
        model = prepare_model(task.model(seed), parallel_strategy_kwargs={"bucket_cap_mb": 0.5})
        optimizer = task.optimizer(model.parameters())
        for ids, targets in task.batches(seed):
            optimizer.zero_grad()
            model(ids, targets).backward()
            optimizer.step()
            task.stepped()
        task.ended(seed, model.module, model.parameters())
    task.close()


task = Task.asked()
# A process of Ray's asks the metadata services of three clouds where it is, even with reports turned off and before it
# looks whether they are (dashboard/modules/usage_stats/usage_stats_head.py:196); at this proxy nobody answers.
os.environ["http_proxy"] = "http://127.0.0.1:9"
with tempfile.TemporaryDirectory(prefix="tq-ray-") as folder:
    ray.init(
        _node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=4, _temp_dir=folder, log_to_driver=False,
        runtime_env={"worker_process_setup_hook": known},
    )  # fmt: skip
    try:
        TorchTrainer(
            train,
            torch_config=TorchConfig(backend=task.backend),
            scaling_config=ScalingConfig(num_workers=task.options.get("workers", 2)),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    finally:
        ray.shutdown()

"""What hooks of DistributedDataParallel add to a training step of one rank, and how long the host is busy in them.

    python -m tq.lab.hook_costs                          25 million parameters on this machine
    python -m tq.lab.hook_costs --preset gpt2-124m       a larger model

One rank sends nobody anything, so what is timed is what a hook computes and what it asks of the host. A step is bound
by the host where its kernels take less time than the host needs to launch them. Then all that a hook asks of the host
is added to the step, and nothing that its kernels compute.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from tqdm import tqdm

from tq.lab import on_gpu
from tq.lab.stats import quartiles
from tq.lab.timing import time_calls
from tq.lab.training_step import SHAPES, Setting
from tq.quant.codec import Codec
from tq.train import collectives, hooks
from tq.train.experiments.ranks import ParallelTrainer
from tq.train.model import GPT, load

WARMUP = 3  # steps before the first that counts: kernels are compiled, buckets laid out anew
Future = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True)
class Way:
    """hook: None is DDP's own mean; state: makes what it is given; bucket_mb: of gradients."""

    hook: Callable[[Any, Any], Future] | None = None
    state: Callable[[], Any] = lambda: None
    bucket_mb: float = 25.0


def _four() -> hooks.HookState:
    return hooks.HookState(Codec(), warmup=0)


def _low_rank() -> powerSGD_hook.PowerSGDState:
    """As PyTorch's documentation has it, but from the third step on."""
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)


FULL = "DDP"
WAYS = {
    FULL: Way(),
    "DDP, buckets of 100 MB": Way(bucket_mb=100.0),
    "bf16": Way(default_hooks.bf16_compress_hook),
    "bf16, buckets of 100 MB": Way(default_hooks.bf16_compress_hook, bucket_mb=100.0),
    "PowerSGD": Way(powerSGD_hook.powerSGD_hook, _low_rank),
    "PowerSGD, buckets of 100 MB": Way(powerSGD_hook.powerSGD_hook, _low_rank, 100.0),
    "4 bits, in pieces": Way(collectives.ddp_hook, _four),
    "4 bits": Way(hooks.ddp_hook, _four),
    "4 bits, buckets of 100 MB": Way(hooks.ddp_hook, _four, 100.0),
    "4 bits, one bucket": Way(hooks.ddp_hook, _four, 1e4),
}


@dataclass
class Row:
    """A way. seconds: of each step; host_s: in the hook, of each step; calls: of the hook, per step; kernels_s: of all
    kernels of a step, None without a GPU."""

    seconds: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    calls: float = 0.0
    kernels_s: float | None = None


class _Watched:
    """A hook, with the host's seconds in it."""

    def __init__(self, hook: Callable[[Any, Any], Future]) -> None:
        self.hook, self.seconds, self.calls = hook, 0.0, 0

    def take(self) -> tuple[float, int]:
        """Seconds and calls since the last time."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = 0.0, 0
        return taken

    def function(self) -> Callable[[Any, Any], Future]:
        def watched(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants its own annotations, or none
            start = time.perf_counter()
            try:
                return self.hook(state, bucket)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        return watched


def measure(
    setting: Setting, names: Collection[str] = tuple(WAYS), repeats: int = 15, progress: bool = True
) -> dict[str, Row]:
    """Steps of the ways by turns, in another order each time; DDP's own mean is always among them.

    Makes a process group of one rank. ValueError for names that are not in ``WAYS``.
    """
    if unknown := set(names) - set(WAYS):
        raise ValueError(f"names must be among {', '.join(WAYS)}, got {sorted(unknown)}")
    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _by_turns(setting, [name for name in WAYS if name in {FULL, *names}], repeats, progress)
    finally:
        dist.destroy_process_group()


def _by_turns(setting: Setting, names: list[str], repeats: int, progress: bool) -> dict[str, Row]:
    watches = {name: _Watched(hook) for name in names if (hook := WAYS[name].hook)}
    trainers = {name: _trainer(setting, WAYS[name], watches.get(name)) for name in names}
    for watch in watches.values():
        watch.take()
    rows, orders = {name: Row() for name in names}, random.Random(0)
    for _ in tqdm(range(repeats), unit="turn", disable=not progress, dynamic_ncols=True):
        for name in orders.sample(names, len(names)):
            row = rows[name]
            row.seconds += time_calls({name: trainers[name].step}, 1, warmup=0)[name]
            if name in watches:
                spent, calls = watches[name].take()
                row.host_s.append(spent)
                row.calls += calls / repeats
    for name in names if setting.device == "cuda" else ():
        rows[name].kernels_s = on_gpu.traced(trainers[name].step)["kernels_s"]
    return rows


def _trainer(setting: Setting, way: Way, watch: _Watched | None) -> ParallelTrainer:
    """One that has taken its first steps."""
    made = ParallelTrainer(
        GPT(setting.shape, 0), load("stdlib", max_bytes=2_000_000), setting.config, device=setting.device,
        hook=None if watch is None else (way.state(), watch.function()), bucket_mb=way.bucket_mb,
    )  # fmt: skip
    made.train(WARMUP, progress=False)
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.lab.hook_costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(SHAPES), default="25m", help="shape of the model (25m)")
    parser.add_argument("--sequences", type=int, default=8, help="per step (8)")
    parser.add_argument("--repeats", type=int, default=15, help="turns (15)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    bf16 = torch.bfloat16 if given.device == "cuda" else None
    setting = Setting(SHAPES[given.preset], given.sequences, autocast=bf16, device=given.device)
    rows = measure(setting, repeats=given.repeats)
    print(f"{setting.shape.num_parameters / 1e6:.0f} million parameters, {setting.tokens} tokens per step, one rank")
    print(f"{'way':30s} {'ms':>8s} {'over DDP':>9s} {'quartiles':>16s} {'host in hook, ms':>17s} {'calls':>6s}")
    for name, row in rows.items():
        low, middle, high = quartiles([a / b for a, b in zip(row.seconds, rows[FULL].seconds, strict=True)])
        host = 1e3 * quartiles(row.host_s)[1] if row.host_s else 0.0
        took = f"{1e3 * quartiles(row.seconds)[1]:8.1f} {middle:9.3f} {f'[{low:.3f}, {high:.3f}]':>16s}"
        print(f"{name:30s} {took} {host:17.2f} {row.calls:6.0f}")


if __name__ == "__main__":
    main()

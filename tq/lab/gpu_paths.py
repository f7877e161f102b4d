"""Every way of training on a simulated GPU: what one step of it launches, and whether the host waits for anything.

  python -m tq.lab.gpu_paths          a table
  python -m tq.lab.gpu_paths --json   the same for programs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.lab.ranks import together
from tq.lab.simulated_gpu import KINDS, SimulatedGPU
from tq.lab.simulated_torch import simulate
from tq.quant.codec import Codec
from tq.train import collectives, hooks
from tq.train.activations import compress_activations
from tq.train.collectives import all_reduce
from tq.train.diloco import DiLoCo
from tq.train.linear import CompressedLinear
from tq.train.model import GPT, GPTConfig
from tq.train.offload import OffloadedAdamW
from tq.train.optim import TurboQuantAdamW

RANKS, WARM = 2, 3  # ranks; steps before the one that is counted
SIDE, COUNT = 32, 4  # weights: so many squares
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Training:
    """make: a step, ready to be called. buckets: that one step handles."""

    make: Callable[[], Step]
    buckets: int = 1


def _codec() -> Codec:
    return Codec(4, 128, nonfinite="propagate")


def _weights() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(SIDE, SIDE, device="cuda")) for _ in range(COUNT)]
    for weight in made:
        weight.grad = torch.randn_like(weight)
    return made


def _optimizer(**options: Any) -> Step:
    return TurboQuantAdamW(_weights(), lr=1e-3, **options).step


def _offloaded() -> Step:
    run = OffloadedAdamW(_weights(), lr=1e-3, state=(4, 8), variant="local", place="host", bucket_elements=SIDE**2)

    def step() -> None:
        run.step()
        run.flush()

    return step


def _activations() -> Step:
    model = GPT(GPTConfig(layers=1, hidden=64, heads=1, vocab=64, seq=32)).to("cuda")
    ids, coded = torch.randint(64, (2, 32), device="cuda"), compress_activations(bits=4, min_elements=1)

    def step() -> None:
        with coded:
            loss = model(ids)[0].square().mean()
        loss.backward()

    return step


def _linear() -> Step:
    layer = CompressedLinear(torch.nn.Linear(64, 64).to("cuda"))
    x = torch.randn(128, 64, device="cuda")
    return lambda: layer(x).square().mean().backward()


def _all_reduce(later: bool) -> Step:
    x, codec = torch.randn(SIDE**2 * COUNT, device="cuda"), _codec()

    def step() -> Tensor:
        work = all_reduce(x, codec, async_op=later)
        if work is not None:
            work.wait()
        return x + 1

    return step


class _Bucket:
    """Of DDP: gradients in a row."""

    def __init__(self, number: int, last: bool) -> None:
        self.x, self.number, self.last = torch.randn(SIDE**2, device="cuda"), number, last

    def buffer(self) -> Tensor:
        """Gradients."""
        return self.x

    def index(self) -> int:
        """Its number."""
        return self.number

    def is_last(self) -> bool:
        """Of the backward pass."""
        return self.last


def _hook(hook: Callable[..., Any]) -> Step:
    state, buckets = hooks.HookState(_codec(), warmup=0), [_Bucket(0, False), _Bucket(1, True)]

    def step() -> list[Tensor]:
        for bucket in buckets:
            bucket.x += 1.0  # backward writes
        begun = [hook(state, bucket) for bucket in buckets]
        return [future.wait() * 2 for future in begun]

    return step


def _reduce_scatter(reduce: collectives.ReduceScatter) -> Step:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    given, own = torch.randn(SIDE**2 * ranks, device="cuda"), torch.empty(SIDE**2, device="cuda")
    assert group is not None

    def step() -> Tensor:
        reduce(own, given, group, dist.ReduceOp.AVG)
        return own + 1

    return step


def _diloco(delay: int) -> Step:
    torch.manual_seed(0)  # replicas start alike
    weights = _weights()
    outer = DiLoCo(weights, every=2, codec=_codec(), delay=delay)

    def inner() -> None:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(0.99)
        outer.step()

    def step() -> None:
        inner()
        inner()

    if delay:
        inner()  # each step then ends after an exchange has arrived
    return step


FAULTS = "planted faults"
NAN: dict[str, Any] = {"nonfinite": "propagate"}
CAPTURABLE = NAN | {"variant": "local", "capturable": True}
PATHS: dict[str, Training] = {
    "optimizer": Training(lambda: _optimizer(state=(4, 8), variant="local")),
    "optimizer, capturable, fp32 state": Training(lambda: _optimizer(state=None, **CAPTURABLE)),
    "optimizer, capturable": Training(lambda: _optimizer(state=(4, 8), **CAPTURABLE)),
    "optimizer, 4-bit exchange": Training(lambda: _optimizer(state=(4, 8), codec=_codec(), warmup=0, **NAN)),
    "offloaded optimizer": Training(_offloaded, COUNT),
    "activations": Training(_activations),
    "compressed linear layer": Training(_linear),
    "all-reduce": Training(lambda: _all_reduce(False)),
    "all-reduce, async": Training(lambda: _all_reduce(True)),
    "DDP hook": Training(lambda: _hook(hooks.ddp_hook), 2),
    "DDP hook, in pieces": Training(lambda: _hook(collectives.ddp_hook), 2),
    "FSDP2 reduce-scatter": Training(lambda: _reduce_scatter(hooks.ReduceScatter(_codec(), warmup=0))),
    "FSDP2 reduce-scatter, in pieces": Training(lambda: _reduce_scatter(collectives.ReduceScatter(_codec()))),
    "DiLoCo": Training(lambda: _diloco(0)),
    "DiLoCo, delayed": Training(lambda: _diloco(1)),
}  # fmt: skip


def _planted() -> dict[str, Step]:
    """Faults: each is right but for one thing."""
    x, side, event = torch.ones(8, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()

    def other_stream() -> None:
        x.add_(1.0)
        with torch.cuda.stream(side):
            x.mul(2.0)

    def too_early() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            event.record()
            x.add_(1.0)
        event.wait()
        x.mul(2.0)

    return {
        "an .item()": lambda: x.sum().item(),
        "work on a stream that waits for nothing": other_stream,
        "an event recorded before the work": too_early,
        "a tensor of the host in a kernel": lambda: x + torch.ones(8),
        "an upload from memory that is not page-locked": lambda: torch.ones(8).to("cuda", non_blocking=True),
    }


def counted(gpu: SimulatedGPU, path: Training) -> dict[str, Any]:
    """What one step of a path asks after ``WARM`` others.

    Returns:
        {"launches" per bucket, "waits" of the training thread, "behind": waits of others, "order", "freed", "place",
        "what": {operation: launches}, "problems": in words}.
    """
    step = path.make()
    for _ in range(WARM):
        step()
    gpu.reset()
    step()
    found: dict[str, Any] = {kind: len(gpu.of_kind(kind)) for kind in KINDS}
    found["behind"] = len(gpu.of_kind("waits", everywhere=True)) - found["waits"]
    found["launches"] = sum(gpu.launches.values()) / path.buckets
    found["what"] = dict(gpu.launches.most_common())
    found["problems"] = sorted({str(problem) for problem in gpu.problems})
    return found


def _on_a_rank(folder: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with simulate() as gpu:
        for name in names:
            if name != FAULTS:
                found[name] = counted(gpu, PATHS[name])
                continue
            found[name] = {}
            for what, step in _planted().items():
                torch.cuda.synchronize()  # after the fault before
                gpu.reset()
                step()
                found[name][what] = [problem.kind for problem in gpu.problems]
    return found


def run(names: list[str]) -> dict[str, Any]:
    """What each path asks on the first of ``RANKS`` ranks, in new processes in which Triton interprets.

    Args:
        names: of ``PATHS``, each as ``counted`` returns; ``FAULTS`` gives {fault: kinds of problems that were found}.
    """
    command = [sys.executable, "-m", "tq.lab.gpu_paths", "--json", *names]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tq.lab.gpu_paths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("names", nargs="*", metavar="PATH", help=f"of {', '.join([*PATHS, FAULTS])}; default: all")
    asked = parser.parse_args(argv)
    if unknown := set(asked.names) - {*PATHS, FAULTS}:
        parser.error(f"unknown paths: {', '.join(sorted(unknown))}")
    os.environ["TRITON_INTERPRET"] = "1"  # of the processes that follow
    found = together(_on_a_rank, RANKS, names=asked.names or [*PATHS, FAULTS])[0]
    if asked.json:
        print(json.dumps(found))
        return 0
    print(f"{'path':28}{'launches per bucket':>20}{'waits':>8}{'behind':>8}{'order':>8}{'freed':>8}{'place':>8}")
    planted = found.pop(FAULTS, {})
    for name, each in found.items():
        kinds = "".join(f"{each[kind]:8}" for kind in ("waits", "behind", "order", "freed", "place"))
        print(f"{name:28}{each['launches']:20.1f}{kinds}")
        for problem in each["problems"]:
            print(f"    {problem}")
    for what, kinds in planted.items():
        print(f"planted: {what}: {', '.join(kinds) or 'not found'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The DDP hook on a simulated GPU against means in pieces: run in a process in which Triton interprets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tq import Codec
from tq.lab import gpu_paths
from tq.lab.ranks import together
from tq.lab.simulated_gpu import plain
from tq.lab.simulated_torch import simulate
from tq.quant.rank_mean import RankMean
from tq.train import collectives, hooks
from tq.train.comm.agreement import GroupError

Codecs = Codec | tuple[Codec, Codec]
CODECS: dict[str, Codecs] = {
    "the default": Codec(),
    "one round, two widths": (Codec(3, 64, rounds=1), Codec(6, 64, rounds=1, scale_dtype=torch.bfloat16)),
    "rounds of both phases differ": (Codec(2, 128, rounds=1, scale="norm"), Codec(4, 128, rounds=3, scale="mse")),
}


def bucket(x: Tensor, number: int = 0, last: bool = True) -> Any:
    """x as DDP gives it."""
    made = gpu_paths._Bucket(number, last)
    made.x = x
    return made


def gradient(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(numel, generator=generator).to(dtype).to("cuda")


def mean(hook: Callable[..., Any], state: Any, x: Tensor, *place: Any) -> Tensor:
    """What a hook makes of a bucket, on the host."""
    made: Tensor = hook(state, bucket(x, *place)).wait()
    return plain(made).clone()


def alike(folder: Path, codec: str, numel: int, dtype: str) -> list[Any]:
    """Whether steps of two buckets have the bits of means in pieces, and a digest of what this rank ended with."""
    kind = getattr(torch, dtype)
    with simulate():
        ours, theirs = (module.HookState(CODECS[codec], warmup=0) for module in (hooks, collectives))
        same, last = [], torch.zeros(0)
        for seed, place in enumerate([(0, False), (1, True)]):
            got, wanted = (gradient(numel, kind, seed) for _ in range(2))
            last = mean(hooks.ddp_hook, ours, got, *place)
            same.append(torch.equal(last, mean(collectives.ddp_hook, theirs, wanted, *place)))
        assert ours.step == theirs.step == 1
    return [same, last.double().sum().item()]


def not_finite(folder: Path) -> list[int]:
    """Blocks that end as NaN where one rank has one NaN and another an infinity."""
    with simulate():
        x = gradient(128 * 6, torch.float32)
        if dist.get_rank() == 1:
            plain(x)[200] = float("nan")
        if dist.get_rank() == 2:
            plain(x)[5 * 128] = float("inf")
        found = mean(hooks.ddp_hook, hooks.HookState(Codec(), warmup=0), x)
    blocks = found.view(6, 128)
    assert bool((blocks.isnan().all(1) == blocks.isnan().any(1)).all())
    return [int(block) for block in blocks.isnan().any(1).nonzero().flatten()]


def one_fails(folder: Path) -> Any:
    """The error of the rank that fails, and whether the others have NaN."""
    with simulate():
        state, x = hooks.HookState(Codec(), warmup=0), gradient(1000, torch.float32)
        if dist.get_rank() != 1:
            return bool(mean(hooks.ddp_hook, state, x).isnan().all())
        with patch.object(RankMean, "encode", side_effect=torch.OutOfMemoryError("no room")):
            try:
                hooks.ddp_hook(state, bucket(x))
            except torch.OutOfMemoryError as error:
                return str(error)
    return None


def others_ask_for_less(folder: Path) -> str:
    """What a rank learns where one comes with another codec."""
    with simulate():
        state = hooks.HookState(Codec(3 if dist.get_rank() == 1 else 4), warmup=0)
        try:
            mean(hooks.ddp_hook, state, gradient(1000, torch.float32))
        except GroupError as error:
            return str(error)
    return ""


def scattered(folder: Path, numel: int, op: str) -> list[Any]:
    """Whether two reduce-scatters have the bits of those of the collectives, and a digest."""
    kind, group = getattr(dist.ReduceOp, op), dist.group.WORLD
    with simulate():
        ours, theirs = hooks.ReduceScatter(Codec(), warmup=0), collectives.ReduceScatter(Codec())
        same, last = [], torch.zeros(0)
        for seed in range(1 + (op == "SUM")):
            outs = [torch.empty(numel, device="cuda") for _ in range(2)]
            for reduce, out in zip((ours, theirs), outs, strict=True):
                reduce(out, gradient(3 * numel, torch.float32, seed), group, kind)  # type: ignore[arg-type]
            last = plain(outs[0])
            same.append(torch.equal(last, plain(outs[1])))
    return [same, last.double().sum().item()]


def all_cases(folder: Path) -> dict[str, Any]:
    """What this rank found in each; those that fail at the end."""
    found: dict[str, Any] = {}
    for codec, numel, dtype in [
        ("the default", 128 * 9 + 5, "float32"), ("one round, two widths", 64 * 7, "float16"),
        ("rounds of both phases differ", 100, "bfloat16"),
    ]:  # fmt: skip
        found[f"mean of {numel} {dtype}, {codec}"] = alike(folder, codec, numel, dtype)
    for numel, op in ((200, "AVG"), (128, "SUM")):
        found[f"{op} of {numel}"] = scattered(folder, numel, op)
    return found | {case.__name__: case(folder) for case in (not_finite, one_fails, others_ask_for_less)}


def main() -> None:
    """What every rank found, as JSON."""
    print(json.dumps(together(all_cases, 3)))


if __name__ == "__main__":
    sys.exit(main())

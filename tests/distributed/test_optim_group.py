"""A real process group gives the bits of the simulated one, for every scheme, and errors reach every rank."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.distributed.helpers import values
from tq.train.comm import pipeline
from tq.train.optim import TurboQuantAdamW, simulate_ranks, step_together
from tq.train.schemes import SCHEMES, rival

PACKAGE = Path(pipeline.__file__).parents[2]  # tq
NAMES = [*(name for name in SCHEMES if name != "local"), "bf16", "powersgd", "top-k"]
AMOUNT = {"powersgd": 2, "top-k": 0.1, "bf16": 0}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 21, bias=False))


def optimizer_of(name: str, of: nn.Module) -> TurboQuantAdamW:
    scheme = name if name in SCHEMES else rival(name, AMOUNT[name])
    return TurboQuantAdamW(of.parameters(), lr=1e-2, variant=scheme, warmup=1, v_every=2, max_norm=1.0)


def backward(of: nn.Module, step: int, rank: int) -> None:
    of.zero_grad()
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    of(x).square().mean().backward()


def worker(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES:
        mine = model()
        optimizer = optimizer_of(name, mine)
        for step in range(4):
            backward(mine, step, rank)
            optimizer.step()
        found[name] = [p.detach().clone() for p in mine.parameters()]
    backward(mine, 9, rank)
    if rank == ranks - 1:
        mine[0].weight.grad[0, 0] = float("nan")
    try:
        optimizer.step()
    except FloatingPointError as error:
        found["error"] = str(error)
    return found


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_a_process_group_gives_the_bits_of_the_simulation(ranks: int, tmp_path: Path) -> None:
    found = values(ranks, tmp_path, worker)
    for name in NAMES:
        replicas = [model() for _ in range(ranks)]
        optimizers = [optimizer_of(name, replica) for replica in replicas]
        simulate_ranks(optimizers)
        for step in range(4):
            for rank, replica in enumerate(replicas):
                backward(replica, step, rank)
            step_together(optimizers)
        for rank, replica in enumerate(replicas):
            for p, q in zip(replica.parameters(), found[rank][name], strict=True):
                # of three numbers the sum depends on the order, which gloo does not promise
                assert torch.equal(p, q) if ranks < 3 else (p - q).norm() < 1e-2 * p.norm(), name
    for rank in range(ranks):
        expected = "the gradient of parameter 0" if rank == ranks - 1 else "another rank's gradient"
        assert expected in found[rank]["error"]


def scaled(rank: int, ranks: int, shared: bool) -> dict[str, Any]:
    """Three steps, in the second of which the gradient of the last rank overflows."""
    mine = model()
    optimizer = optimizer_of("gradient", mine)
    scaler = (ShardedGradScaler if shared else torch.amp.GradScaler)("cpu", init_scale=8.0)
    for step in range(3):
        mine.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
        scaler.scale(mine(x).square().mean()).backward()
        if step == 1 and rank == ranks - 1:
            mine[0].weight.grad[0, 0] = float("inf")
        if shared:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    weights = [p.detach().clone() for p in mine.parameters()]
    return {"scale": scaler.get_scale(), "steps": optimizer.steps_done, "weights": weights}


def test_ranks_under_a_grad_scaler_skip_together_and_scales_may_agree(tmp_path: Path) -> None:
    own, shared = (values(2, tmp_path / str(kind), scaled, kind) for kind in (False, True))
    assert [found["scale"] for found in own] == [8.0, 4.0]  # each divides by its own: powers of two, so exactly
    assert [found["scale"] for found in shared] == [4.0, 4.0]
    for found in (*own, *shared):
        assert found["steps"] == 2
        assert all(torch.equal(p, q) for p, q in zip(found["weights"], own[0]["weights"], strict=True))


def walks(rank: int, ranks: int) -> dict[str, Any]:
    """Of every scheme: frames of tq between a call of ``step`` and what sends or receives."""
    deepest: dict[str, Any] = {}
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def counting(*args: Any, **options: Any) -> Any:
            stack = traceback.extract_stack()
            names = [frame.name for frame in stack if Path(frame.filename).is_relative_to(PACKAGE)]
            calls[name] += 1
            if len(names) > len(deepest.get(scheme, ())):
                deepest[scheme] = names
            return call(*args, **options)

        return counting

    for name in ("isend", "irecv", "all_reduce"):
        setattr(dist, name, counted(name))
    for scheme in NAMES:
        mine = model()
        optimizer = optimizer_of(scheme, mine)
        for step in range(2):
            backward(mine, step, rank)
            optimizer.step()
    return {"deepest": deepest, "calls": dict(calls)}


def test_from_the_step_to_the_wire_it_is_eight_frames(tmp_path: Path) -> None:
    for found in values(2, tmp_path, walks):
        assert set(found["calls"]) == {"isend", "irecv", "all_reduce"} and set(found["deepest"]) == set(NAMES)
        for scheme, names in found["deepest"].items():
            assert names[0] == "step" and len(names) <= 8, (scheme, names)


def order(rank: int, ranks: int) -> dict[str, list[str]]:
    """What becomes of four buckets in a step, in the order in which it happens."""
    happened: list[str] = []
    numbers: dict[int, int] = {}

    def noted(name: str) -> Callable[..., Any]:
        call = getattr(pipeline._Piece, name)

        def noting(piece: Any, *args: Any) -> Any:
            number = numbers.setdefault(id(piece), len(numbers))
            happened.append(f"{name} {number}")
            return call(piece, *args)

        return noting

    for name in ("send", "average", "receive"):
        setattr(pipeline._Piece, name, noted(name))
    found = {}
    for scheme in ("gradient", "momentum-ef"):
        mine = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
        optimizer = TurboQuantAdamW(mine.parameters(), variant=scheme, bucket_elements=1, warmup=0)
        backward(mine, 0, rank)
        happened.clear()
        numbers.clear()
        optimizer.step()
        found[scheme] = list(happened)
    return found


def test_a_bucket_is_encoded_while_another_travels(tmp_path: Path) -> None:
    expected = [
        "send 0",
        *("send 1", "average 0"),
        *("send 2", "average 1", "receive 0"),
        *("send 3", "average 2", "receive 1"),
        *("average 3", "receive 2"),
        "receive 3",
    ]
    for found in values(2, tmp_path, order):
        assert found == {"gradient": expected, "momentum-ef": expected}

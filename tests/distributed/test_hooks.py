"""A hook's state is made where there is no process group yet, and works as the one that needs it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.helpers import outcomes, values
from tests.distributed.test_collectives import batch, digest, model
from tq import Codec
from tq.train import collectives
from tq.train.hooks import HookState, ReduceScatter, ddp_hook


def gradients(rank: int, ranks: int, pickled: bytes | None) -> Any:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    state = collectives.HookState(Codec(4, block=64), warmup=0) if pickled is None else pickle.loads(pickled)
    state.load_state_dict({"step": 7})
    wrapped.register_comm_hook(state, ddp_hook)
    for step in range(2):
        wrapped(batch(step, rank), rare=True).square().mean().backward()
    return {"step": state.step, "digest": digest(*(p.grad for p in wrapped.parameters()))}


@pytest.mark.xdist_group("ranks")
def test_a_state_is_made_before_the_group(tmp_path: Path) -> None:
    pickled = pickle.dumps(HookState(Codec(4, block=64), warmup=0))
    found = values(2, tmp_path / "before", gradients, pickled)
    assert found[0] == found[1] and found[0]["step"] == 9
    assert found == values(2, tmp_path / "after", gradients, None)


def first_steps(rank: int, ranks: int) -> Any:
    """Means of the first steps while DDP sums, by itself, which parameters were used; and of one coded step."""
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001, find_unused_parameters=True)
    wrapped.register_comm_hook(HookState(Codec(4, block=64), warmup=30), ddp_hook)
    found = []
    for step in range(31):
        wrapped.zero_grad()
        wrapped(batch(step, rank), rare=step == 30 and rank == 0).square().mean().backward()
        found.append([p.grad.clone() for p in wrapped.parameters() if p.grad is not None])
    return found


@pytest.mark.xdist_group("ranks")
def test_first_steps_beside_sums_of_ddp(tmp_path: Path) -> None:
    first, second = values(2, tmp_path, first_steps)
    for step, (mine, other) in enumerate(zip(first, second, strict=True)):
        assert len(mine) == len(other) > 0 and all(map(torch.equal, mine, other))
        alone = model()
        for rank in range(2):
            (alone(batch(step, rank), rare=step == 30 and rank == 0).square().mean() / 2).backward()
        exact = [p.grad for p in alone.parameters() if p.grad is not None]
        error = max(((x - y).norm() / y.norm()).item() for x, y in zip(mine, exact, strict=True))
        assert error < 1e-5 if step < 30 else 1e-3 < error < 0.5


def with_fsdp(rank: int, ranks: int, warmup: int) -> Any:
    replica, kept = model(), []
    for part in (replica.a, replica.b, replica.rare, replica):
        fully_shard(part)
        kept.append(ReduceScatter(Codec(4, block=64), warmup))
        part.set_custom_reduce_scatter(kept[-1])
    found = []
    for step in range(4):
        replica.zero_grad()
        replica(batch(step, rank), rare=True).square().mean().backward()
        found.append([p.grad.full_tensor().clone() for p in replica.parameters()])
    assert {each.step for each in kept} == {0, 4}  # the outermost one has no parameters of its own
    return found


@pytest.mark.xdist_group("ranks")
def test_first_reduce_scatters_are_exact(tmp_path: Path) -> None:
    for step, (mine, other) in enumerate(zip(*values(2, tmp_path, with_fsdp, 2), strict=True)):
        assert all(map(torch.equal, mine, other))
        alone = model()
        for rank in range(2):
            (alone(batch(step, rank), rare=True).square().mean() / 2).backward()
        error = max(((x - p.grad).norm() / p.grad.norm()).item() for x, p in zip(mine, alone.parameters(), strict=True))
        assert error < 1e-5 if step < 2 else 1e-3 < error < 0.5


def differs(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    ReduceScatter(Codec(4), warmup=rank)(torch.empty(1000), torch.ones(2000), group, dist.ReduceOp.AVG)


@pytest.mark.xdist_group("ranks")
def test_ranks_with_other_first_steps_are_told(tmp_path: Path) -> None:
    for outcome in outcomes(2, tmp_path, differs):
        assert "GroupError" in outcome["error"]


def test_errors() -> None:
    for bad in (-1, True, 2.0):
        with pytest.raises(ValueError, match="warmup must be an integer >= 0"):
            HookState(Codec(), warmup=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="warmup must be an integer >= 0"):
            ReduceScatter(Codec(), warmup=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one block"):
        HookState((Codec(), Codec(block=64)))
    with pytest.raises(RuntimeError, match="init_process_group"):
        torch.as_tensor(HookState(Codec()).channel)
    state = HookState(Codec(4), warmup=3)
    again = pickle.loads(pickle.dumps(state))
    assert again.codecs == state.codecs and again.warmup == 3 and again.state_dict() == {"step": 0}

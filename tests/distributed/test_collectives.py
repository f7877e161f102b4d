"""Compressed collectives between real processes: error, identical bytes, faults that name the rank."""

from __future__ import annotations

import os
import re
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.helpers import outcomes, values
from tq import Codec
from tq.quant.bounds import unbiased_nmse
from tq.train import collectives
from tq.train.collectives import (
    GroupError,
    HookState,
    Mean,
    ReduceScatter,
    all_gather_mean,
    all_reduce,
    background,
    ddp_hook,
    over_group,
)  # fmt: skip
from tq.train.comm import pipeline

SIZES = (1, 127, 128, 1000, 70_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parts(shape: tuple[int, ...], ranks: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(97 * seed + r)).to(dtype) for r in range(ranks)]


def digest(*tensors: Tensor) -> int:
    crc = 0
    for x in tensors:
        crc = zlib.crc32(x.detach().contiguous().view(torch.uint8).numpy().tobytes(), crc)
    return crc


def nmse(x: Tensor, exact: Tensor) -> float:
    return ((x.float() - exact.float()).square().mean() / exact.float().square().mean()).item()


def means(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for n in SIZES:
        for dtype in DTYPES:
            given = parts((n,), ranks, dtype)
            x = given[rank].clone()
            assert all_reduce(x, Codec(4)) is None
            exact = torch.stack([g.float() for g in given]).mean(0)
            found[f"{n} {dtype}"] = (digest(x), nmse(x, exact))
    big = parts((300, 301), ranks)[rank]
    whole, small = big.clone(), big.clone()
    all_reduce(whole, Codec(3), step=5)
    pipeline.mean_over([(small.view(-1), (5, 0))], (Codec(3), Codec(3)), piece=4096)
    found["pieces"] = bool(torch.equal(whole, small))
    late = big.clone()
    works = [all_reduce(late, Codec(3), async_op=True, step=5)]
    others = [big.clone() for _ in range(3)]
    works += [all_reduce(x, Codec(3), async_op=True, step=5) for x in others]
    for work in works:
        work.wait()
    found["async"] = all(
        bool(torch.equal(whole, x)) and work.is_completed() for x, work in zip(others, works[1:], strict=True)
    )
    views = torch.randn(64, 64, generator=torch.Generator().manual_seed(rank))
    mixed = [views.t()[:, :7], views[0, :3].half(), torch.empty(0), views[:2].clone()]
    exact = [x.float().clone() for x in mixed]
    for x in exact:
        dist.all_reduce(x)
    all_reduce(mixed, Codec(8))
    found["list"] = (digest(*mixed), max(nmse(x, e / ranks) for x, e in zip(mixed, exact, strict=True) if x.numel()))
    published = parts((5000,), ranks)[rank]
    all_gather_mean(published, Codec(4))
    found["all-gather"] = (digest(published), nmse(published, torch.stack(parts((5000,), ranks)).mean(0)))
    simulated = [Mean(x.clone(), (Codec(2), Codec(2)), (3, 1)) for x in parts((5000,), ranks)]
    collectives.mean_in_process(simulated)
    mine = Mean(parts((5000,), ranks)[rank], (Codec(2), Codec(2)), (3, 1))
    collectives.over_group([mine])
    found["simulation"] = bool(torch.equal(mine.x, simulated[0].x))
    return found


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 8))
def test_means(ranks: int, tmp_path: Path) -> None:
    found = values(ranks, tmp_path, means)
    noise = unbiased_nmse(4)
    for key in found[0]:
        first = found[0][key]
        if isinstance(first, bool):
            assert all(f[key] is True for f in found), key
            continue
        assert len({f[key][0] for f in found}) == 1, f"{key}: the ranks differ"
        limit = 1e-3 if key == "list" else noise + ranks * noise / ranks * (1 + noise)
        # padding: a single number in a block of 128 is a spike, and its error is not the mean one
        assert first[1] < limit * (1.25 if key.startswith(("70003", "1000", "all")) else 4), key


def thousand(rank: int, ranks: int) -> list[int]:
    """Crc of the replica after every hundredth step."""
    x, crcs = torch.zeros(1000), []
    for step in range(1000):
        g = torch.randn(1000, generator=torch.Generator().manual_seed(ranks * step + rank))
        all_reduce(g, Codec(2), step=step)
        x -= 0.1 * g
        if step % 100 == 99:
            crcs.append(digest(x))
    return crcs


def test_replicas_hold_the_same_bytes_over_a_thousand_steps(tmp_path: Path) -> None:
    found = values(2, tmp_path, thousand)
    assert found[0] == found[1] and len(set(found[0])) == 10


# --- DDP and FSDP2 --------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A part of it is not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rare = nn.Linear(60, 50), nn.Linear(50, 9), nn.Linear(60, 9)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        return self.b(self.a(x).tanh()) + (self.rare(x) if rare else 0.0)


def model() -> Branches:
    torch.manual_seed(0)
    return Branches()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * step + rank))


def with_ddp(rank: int, ranks: int, bucket_mb: float) -> Any:
    wrapped = DistributedDataParallel(model(), find_unused_parameters=True, bucket_cap_mb=bucket_mb)
    state = HookState(Codec(8, block=64), warmup=0)
    wrapped.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(step, 50 + rank), rare=step % 2 == 0).square().mean().backward()
        wrapped(batch(step, rank), rare=step % 2 == 0).square().mean().backward()
        optimizer.step()
    assert state.step == 6 and state.state_dict() == {"step": 6}
    return {"digest": digest(*wrapped.parameters()), "weights": [p.detach().clone() for p in wrapped.parameters()]}


def plainly(ranks: int) -> list[Tensor]:
    replica = model()
    optimizer = torch.optim.SGD(replica.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(ranks):
            for part in (50 + rank, rank):
                (replica(batch(step, part), rare=step % 2 == 0).square().mean() / ranks).backward()
        optimizer.step()
    return [p.detach() for p in replica.parameters()]


@pytest.mark.parametrize("bucket_mb", (0.01, 25.0))
def test_ddp_hook_with_accumulation_and_unused_parameters(bucket_mb: float, tmp_path: Path) -> None:
    """Several buckets or one: the same weights to within the codec's error."""
    found = values(2, tmp_path, with_ddp, bucket_mb)
    assert found[0]["digest"] == found[1]["digest"]
    for p, exact, start in zip(found[0]["weights"], plainly(2), model().parameters(), strict=True):
        assert (p - exact).norm() < 0.02 * (exact - start).norm() + 1e-7


def two_exact_steps(rank: int, ranks: int) -> Any:
    """Weights after every step of three, with exact means in the first two, and with PyTorch's own in all."""
    found = []
    for hooked in (True, False):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.01)
        if hooked:
            wrapped.register_comm_hook(HookState(Codec(2, block=64), warmup=2), ddp_hook)
        optimizer, after = torch.optim.SGD(wrapped.parameters(), 0.1), []
        for step in range(3):
            optimizer.zero_grad()
            wrapped(batch(step, rank), rare=True).square().mean().backward()
            optimizer.step()
            after.append([p.detach().clone() for p in wrapped.parameters()])
        found.append(after)
    return found


def test_the_hook_sends_exact_means_first(tmp_path: Path) -> None:
    for ours, theirs in values(2, tmp_path, two_exact_steps):
        for step, (here, there) in enumerate(zip(ours, theirs, strict=True)):
            near = all(torch.allclose(p, q, rtol=1e-6, atol=1e-8) for p, q in zip(here, there, strict=True))
            assert near == (step < 2)


@pytest.mark.parametrize("bad", (-1, True, 2.0))
def test_a_hooks_warmup_is_a_number_of_steps(bad: Any) -> None:
    with pytest.raises(ValueError, match="warmup must be an integer >= 0"):
        HookState(Codec(), warmup=bad)


class Tied(nn.Module):
    """One weight used twice, and a block that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.block, self.last = nn.Linear(40, 40), nn.Linear(40, 60, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, (x @ self.last.weight).tanh(), use_reentrant=False))


def tied(wrapped: nn.Module, batches: list[list[Tensor]]) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for given in batches:
        optimizer.zero_grad()
        for x in given:
            (wrapped(x).square().mean() / len(given)).backward()
        optimizer.step()


def static(rank: int, ranks: int) -> Any:
    replica = Tied()
    wrapped = DistributedDataParallel(replica, static_graph=True, bucket_cap_mb=0.005)
    wrapped.register_comm_hook(HookState(Codec(8, block=64), warmup=0), ddp_hook)
    tied(wrapped, [[batch(step, rank)] for step in range(6)])
    return {"digest": digest(*replica.parameters()), "weights": [p.detach().clone() for p in replica.parameters()]}


def test_ddp_with_a_static_graph_and_tied_weights(tmp_path: Path) -> None:
    found = values(2, tmp_path, static)
    assert found[0]["digest"] == found[1]["digest"]
    alone = Tied()
    tied(alone, [[batch(step, rank) for rank in range(2)] for step in range(6)])
    for p, exact, start in zip(found[0]["weights"], alone.parameters(), Tied().parameters(), strict=True):
        assert (p - exact).norm() <= 0.02 * (exact - start).norm() + 1e-7


def with_fsdp(rank: int, ranks: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    replica = model()
    exchanged = ReduceScatter(Codec(8, block=64))
    for part in (replica.a, replica.b, replica.rare, replica):
        fully_shard(part)
        part.set_custom_reduce_scatter(exchanged)
    optimizer = torch.optim.SGD(replica.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        for part in (50 + rank, rank):
            replica.set_requires_gradient_sync(part == rank)
            replica(batch(step, part), rare=True).square().mean().backward()
        optimizer.step()
    assert exchanged.step > 0
    return [p.full_tensor().detach().clone() for p in replica.parameters()]


def test_fsdp_reduce_scatter(tmp_path: Path) -> None:
    found = values(2, tmp_path, with_fsdp)
    replica = model()
    optimizer = torch.optim.SGD(replica.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        for part in (50, 51, 0, 1):
            (replica(batch(step, part), rare=True).square().mean() / 2).backward()
        optimizer.step()
    for p, other, exact, start in zip(*found, replica.parameters(), model().parameters(), strict=True):
        assert torch.equal(p, other)
        assert (p - exact).norm() < 0.02 * (exact - start).norm() + 1e-7


def of_readme(rank: int, ranks: int) -> bool:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "ddp_hook" in b]
    names = {"x": batch(0, rank), "model": model()}
    exec(block, names)
    before = [p.detach().clone() for p in names["model"].parameters()]
    for step in range(3):
        names["optimizer"].zero_grad()
        names["replica"](batch(step, rank), rare=True).square().mean().backward()
        names["optimizer"].step()
    moved = any(not torch.equal(p, b) for p, b in zip(names["model"].parameters(), before, strict=True))
    return nmse(names["y"], names["x"]) < 0.02 and moved and bool(names["loss"].isfinite().all())


def test_the_lines_of_the_readme(tmp_path: Path) -> None:
    assert values(2, tmp_path, of_readme) == [True, True]


# --- what goes wrong ------------------------------------------------------------------------------------------


def another_codec(rank: int, ranks: int) -> None:
    all_reduce(torch.ones(1000), Codec(2 if rank == 1 else 4))


def another_size(rank: int, ranks: int) -> None:
    all_reduce(torch.ones(999 if rank == 2 else 1000), Codec(4))


def not_finite(rank: int, ranks: int) -> None:
    x = torch.ones(5000)
    if rank == 1:
        x[4000] = float("nan")
    all_reduce(x, Codec(4))


def killed(rank: int, ranks: int) -> None:
    for step in range(100):
        if rank == 1 and step == 3:
            os._exit(9)
        all_reduce(torch.ones(10_000), Codec(4), step=step)


def killed_in_the_background(rank: int, ranks: int) -> None:
    for step in range(100):
        if rank == 1 and step == 3:
            os._exit(9)
        all_reduce(torch.ones(10_000), Codec(4), step=step, async_op=True).wait()


@pytest.mark.parametrize(
    ("ranks", "case", "said"),
    (
        (3, another_codec, r"GroupError: rank 1 asks for a mean of .* by Codec\(bits=2.*others for .* Codec\(bits=4"),
        (3, another_size, "GroupError: rank 2 asks for a mean of 999 x float32 .*others for a mean of 1000 x float32 "),
        (3, not_finite, "FloatingPointError: what rank 1 sent holds numbers that are not finite"),
    ),
)
def test_every_rank_says_who_and_why(ranks: int, case: Any, said: str, tmp_path: Path) -> None:
    found = outcomes(ranks, tmp_path, case, timeout_s=20)
    for outcome in found:
        assert re.search(said, outcome["error"]), outcome


@pytest.mark.parametrize("case", (killed, killed_in_the_background))
def test_a_rank_that_dies_is_named_by_the_others(case: Any, tmp_path: Path) -> None:
    found = outcomes(3, tmp_path, case, timeout_s=20)
    assert found[1] == {}
    for rank in (0, 2):
        assert "GroupError" in found[rank]["error"] and "no answer from rank 1:" in found[rank]["error"], found[rank]


DIFFERENT = {
    "step": lambda odd: all_reduce(torch.ones(1000), Codec(4), step=10 if odd else 20),
    "seed of the second phase": lambda odd: all_reduce(torch.ones(1000), (Codec(4), Codec(4, seed=7 if odd else 0))),
    "bits of the second phase": lambda odd: all_reduce(torch.ones(1000), (Codec(4), Codec(8 if odd else 4))),
    "kind": lambda odd: all_reduce(torch.ones(1000, dtype=torch.bfloat16 if odd else torch.float32), Codec(4)),
    "nothing": lambda odd: all_reduce([] if odd else torch.ones(1000), Codec(4)),
    "seed of a gathering": lambda odd: all_gather_mean(torch.ones(1000), Codec(4, seed=int(odd))),
    "size in fp32": lambda odd: over_group([Mean(torch.ones(999 if odd else 1000))]),
    "feedback": lambda odd: over_group(
        [Mean(torch.ones(256), (Codec(4), Codec(4)), residuals=(torch.zeros(256), torch.zeros(128)) if odd else None)]
    ),
}


def differ(rank: int, ranks: int) -> dict[str, str]:
    """All in turn, after calls in which they agreed: a mistake may come late, and hurts no later call."""
    said = {}
    for name, call in DIFFERENT.items():
        call(False)
        try:
            call(rank == 1)
        except GroupError as error:
            said[name] = f"{error.ranks} {error}"
    x = torch.full((300,), float(rank))
    all_reduce(x, Codec(8))
    said["mean"] = f"{x.mean().item():.1f}"
    return said


def test_ranks_that_differ_in_anything_are_told(tmp_path: Path) -> None:
    for said in values(3, tmp_path, differ):
        assert said.pop("mean") == "1.0"
        assert said.keys() == DIFFERENT.keys()
        assert all(text.startswith("(1,) rank 1 asks for") for text in said.values()), said


def uneven_groups(rank: int, ranks: int) -> list[float]:
    """Ranks belong to different numbers of groups; lanes need none of their own, and leave nothing behind."""
    own = dist.new_group([0])
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    found = []
    for pair in pairs[:1] if rank == 0 else pairs[1:] if rank == 2 else pairs:
        x = torch.full((500,), float(rank))
        work = all_reduce(x, Codec(8), group=pair, async_op=True)
        assert work is not None
        work.wait()
        found.append(round(x.mean().item(), 2))
    HookState(Codec(), warmup=0)
    asked = Mean(torch.full((700,), float(rank)))
    assert torch.allclose(background(asked).wait().mean, torch.full((700,), (ranks - 1) / 2))
    before = threading.active_count()
    for _ in range(6):
        group = dist.new_group([0, 1, 2])
        all_reduce(torch.ones(10), Codec(4), group=group, async_op=True).wait()  # type: ignore[union-attr]
        dist.destroy_process_group(group)
    assert threading.active_count() <= before + 2
    assert (rank == 0) == (own != dist.GroupMember.NON_GROUP_MEMBER)
    return found


def test_lanes_where_ranks_have_other_groups(tmp_path: Path) -> None:
    assert values(3, tmp_path, uneven_groups) == [[0.5], [0.5, 1.5], [1.5]]


def many_tensors(rank: int, ranks: int) -> float:
    tensors = [torch.full((3,), float(rank)) for _ in range(20_000)]
    all_reduce(tensors[:100], Codec(8))  # compiled before the time is taken
    tensors[:100] = [torch.full((3,), float(rank)) for _ in range(100)]
    start = time.perf_counter()
    all_reduce(tensors, Codec(8))
    assert abs(tensors[-1].mean().item() - 0.5) < 0.01
    return time.perf_counter() - start


def test_a_long_list_takes_time_in_proportion(tmp_path: Path) -> None:
    assert max(values(2, tmp_path, many_tensors)) < 5


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="it is expanded"):
        all_reduce(torch.ones(1).expand(300), Codec())
    with pytest.raises(TypeError, match="float64"):
        all_reduce(torch.ones(3, dtype=torch.float64), Codec())
    with pytest.raises(ValueError, match="one block"):
        all_reduce(torch.ones(3), (Codec(), Codec(block=64)))
    with pytest.raises(RuntimeError, match="init_process_group"):
        HookState(Codec(), warmup=0)

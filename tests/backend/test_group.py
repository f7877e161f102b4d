"""The backend under engines that know nothing of it: everything as gloo does it, sums and means of gradients coded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tq.backend
from tests.distributed.helpers import outcomes, values
from tq.backend import Config
from tq.backend.group import FORWARDED, CodedGroup
from tq.quant.codec import Codec

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(autouse=True)
def no_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_WARMUP", "0")


def noise(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def every_collective(rank: int, ranks: int) -> list[Tensor]:
    """Results of everything that is not coded: small, of integers, or another operation."""
    x, found = noise(rank, 64), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        if op != dist.ReduceOp.AVG or dist.get_backend() == "tq":  # gloo has no AVG for every collective
            dist.all_reduce(y := x.clone(), op)
            found.append(y / ranks if op == dist.ReduceOp.AVG else y)
    dist.all_reduce(big := torch.arange(10_000) * (rank + 1))
    dist.all_reduce(largest := noise(rank, 10_000), dist.ReduceOp.MAX)
    dist.broadcast(sent := noise(rank, 10_000), 1)
    dist.reduce(reduced := noise(rank, 5000), 0)
    found += [big, largest, sent, reduced if rank == 0 else torch.zeros(1)]
    parts = [torch.empty(64) for _ in range(ranks)]
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole := torch.empty(ranks * 5000), noise(rank, 5000))
    dist.reduce_scatter_tensor(small := torch.empty(8), noise(rank, 8 * ranks))
    dist.all_to_all_single(exchanged := torch.empty(ranks * 3000), noise(rank, ranks * 3000))
    found += [*parts, whole, small, exchanged]
    gathered = [torch.empty(64) for _ in range(ranks)] if rank == 0 else None
    dist.gather(x, gathered)
    dist.scatter(mine := torch.empty(4), list(noise(9, 4 * ranks).split(4)) if rank == 0 else None)
    found += [*(gathered or []), mine]
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(got := torch.empty(64), 0)
        found.append(got)
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    found.append(torch.tensor([each["rank"] for each in objects]))
    dist.all_reduce_coalesced(several := [noise(rank, 3), noise(rank + 7, 5)])
    return [*found, *several]


def test_what_is_not_coded_is_as_gloo_does_it(tmp_path: Path) -> None:
    for ours, theirs in zip(
        values(2, tmp_path / "tq", every_collective, backend="tq"), values(2, tmp_path / "gloo", every_collective),
        strict=True,
    ):  # fmt: skip
        own = [each for number, each in enumerate(ours) if number != 1]  # AVG
        assert torch.allclose(ours[1], ours[0] / 4)
        assert all(torch.equal(one, other) for one, other in zip(own, theirs, strict=True))


def test_every_collective_of_gloo_is_there() -> None:
    """Nothing that PyTorch's own group can do falls through to a base class that does nothing."""
    parts = ("all", "reduce", "gather", "scatter", "send", "recv", "broadcast", "barrier")
    known = [name for name in dir(dist.ProcessGroupGloo) if any(part in name for part in parts)]
    collectives = {name for name in known if not any(part in name for part in ("monitored", "alloc", "__"))}
    own = {*FORWARDED, *vars(CodedGroup)}
    assert collectives <= own, collectives - own


def summed(rank: int, ranks: int, numel: int, dtype: torch.dtype) -> dict[str, Any]:
    found = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG)):
        x = noise(rank, numel).to(dtype)
        work = dist.all_reduce(x, op, async_op=True)
        work.wait()
        found[name] = x
    found["report"] = tq.backend.report()
    found["calls"] = tq.backend.state_dict()
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_a_large_sum_is_coded_and_the_same_on_all_ranks(dtype: torch.dtype, tmp_path: Path) -> None:
    numel = 100_003
    found = values(3, tmp_path, summed, numel, dtype, backend="tq")
    exact = sum(noise(rank, numel) for rank in range(3))
    for name, wanted in (("sum", exact), ("mean", exact / 3)):
        assert all(torch.equal(each[name], found[0][name]) for each in found)
        error = (found[0][name].float() - wanted).norm() / wanted.norm()
        assert 0.02 < error < 0.16
    assert found[0]["calls"] == {"0": 2}
    ratio = float(found[0]["report"].splitlines()[1].split()[-1])
    assert ratio == pytest.approx(32 / 4.25 if dtype == torch.float32 else 16 / 4.25, rel=0.01)


def other_sums(rank: int, ranks: int) -> dict[str, Any]:
    given = noise(rank, 8 * 5000)
    dist.reduce_scatter_tensor(mine := torch.empty(len(given) // ranks), given)
    dist.reduce_scatter_tensor(mean := torch.empty(len(given) // ranks), given, dist.ReduceOp.AVG)
    dist.all_gather_into_tensor(gathered := torch.empty(ranks * 5000), noise(rank, 5000))
    dist.all_to_all_single(exchanged := torch.empty(ranks * 5000), noise(rank, ranks * 5000))
    lines = [line.split() for line in tq.backend.report().splitlines()[1:]]
    kinds, calls = {line[1]: int(line[3]) for line in lines}, sorted(int(line[2]) for line in lines)
    return {"mine": mine, "mean": mean, "gathered": gathered, "exchanged": exchanged, "kinds": kinds, "calls": calls}


@pytest.mark.parametrize("codes", ("all_reduce,reduce_scatter", "reduce_scatter,all_gather,all_to_all", ""))
def test_other_collectives(codes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CODES", codes)
    ranks = 2
    found = values(ranks, tmp_path, other_sums, backend="tq")
    whole = sum(noise(rank, 8 * 5000) for rank in range(ranks))
    gathered = torch.cat([noise(rank, 5000) for rank in range(ranks)])
    for rank, each in enumerate(found):
        part = whole.chunk(ranks)[rank]
        exchanged = torch.cat([noise(other, ranks * 5000).chunk(ranks)[rank] for other in range(ranks)])
        wanted = {"mine": part, "mean": part / ranks, "gathered": gathered, "exchanged": exchanged}
        of = {"mine": "reduce_scatter", "mean": "reduce_scatter", "gathered": "all_gather", "exchanged": "all_to_all"}
        for name, right in wanted.items():
            error = float((each[name] - right).norm() / right.norm())
            coded = of[name] in codes.split(",")
            assert (0.02 < error < 0.16) if coded else error < 1e-6, (name, error)
            assert (each["kinds"][of[name]] > 0) == coded
    assert torch.equal(found[0]["gathered"], found[1]["gathered"]), "its own part is coded too"
    assert found[0]["calls"] == [1, 1, 2], "messages of codes travel in a group of their own"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 300), nn.Tanh(), nn.Linear(300, 60))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(wrapped: nn.Module, rank: int, steps: int = 6) -> list[Tensor]:
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in wrapped.parameters()]


def plain_ddp(rank: int, ranks: int) -> list[Tensor]:
    return trained(DistributedDataParallel(net()), rank)


def coded_ddp(rank: int, ranks: int) -> dict[str, Any]:
    weights = trained(DistributedDataParallel(net()), rank)
    lines = [line.split() for line in tq.backend.report().splitlines()[1:]]
    return {"weights": weights, "ratio": next(float(line[-1]) for line in lines if line[1] == "all_reduce")}


def coded_fsdp(rank: int, ranks: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",), backend_override={"dp": "tq"})
    wrapped = net()
    fully_shard(wrapped, mesh=mesh)
    weights = trained(wrapped, rank)
    lines = [line.split() for line in tq.backend.report().splitlines()[1:]]
    return {"weights": weights, "ratio": max(float(line[-1]) for line in lines if line[1] == "reduce_scatter")}


@pytest.mark.parametrize(("train", "backend"), [(coded_ddp, "tq"), (coded_fsdp, "gloo"), (coded_fsdp, "tq")])
def test_engines_as_they_are(train: Any, backend: str, tmp_path: Path) -> None:
    found = values(2, tmp_path / "coded", train, backend=backend)
    plain = values(2, tmp_path / "plain", plain_ddp)[0]
    for one, other, exact, start in zip(
        found[0]["weights"], found[1]["weights"], plain, net().parameters(), strict=True
    ):
        assert torch.equal(one, other), "replicas are equal to the bit"
        assert (one - exact).norm() < 0.2 * (exact - start).norm() + 1e-7
    assert found[0]["ratio"] > 7


def test_settings_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "differ.py"
    script.write_text(
        "import sys, torch.distributed as dist, tq.backend\n"
        "rank = int(sys.argv[1])\n"
        "tq.backend.configure(min_numel=100 + rank)\n"
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, 2)\n"
        "dist.init_process_group('tq', store=store, rank=rank, world_size=2)\n"
    )
    began = time.monotonic()
    commands = [[sys.executable, str(script), str(rank)] for rank in range(2)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in ranks:
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 1 and "GroupError: backend tq: rank 0 has" in said and "rank 1 has" in said
    assert time.monotonic() - began < 40


def until_it_fails(sums: int) -> str:
    """Seconds, and the error of one of so many sums."""
    began = time.monotonic()
    try:
        for _ in range(sums):
            dist.all_reduce(torch.ones(10_000))
    except Exception as error:
        return f"{time.monotonic() - began:.1f} {type(error).__name__}: {error}"
    return "no error"


def dies(rank: int, ranks: int) -> str:
    dist.all_reduce(torch.ones(10_000))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return until_it_fails(3)


def test_a_rank_that_dies_is_told_at_once(tmp_path: Path) -> None:
    found = outcomes(3, tmp_path, dies, timeout_s=60, backend="tq")
    assert found[1] == {}
    for rank in (0, 2):
        seconds = float(found[rank]["error"].split()[0] if "error" in found[rank] else found[rank]["value"].split()[0])
        assert seconds < 10


def dies_before_the_group_is_made(rank: int, ranks: int) -> str:
    if rank == 1:  # where the others already wait for it, in the store
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return until_it_fails(1)


def test_a_rank_that_dies_while_the_group_for_coded_traffic_is_made(tmp_path: Path) -> None:
    found = outcomes(3, tmp_path, dies_before_the_group_is_made, timeout_s=40, backend="tq")
    assert found[1] == {}
    for rank in (0, 2):
        seconds, said = found[rank]["value"].split(maxsplit=1)
        assert float(seconds) < 10 and said.startswith("GroupError: rank ") and "group for coded traffic" in said


def mixed(rank: int, ranks: int) -> list[Tensor]:
    """Coded sums under way while others pass them on gloo's own connections, in an order of each rank's threads."""
    found = []
    for turn in range(30):
        works = [dist.all_reduce(x := noise(rank + turn, 20_000), async_op=True)]
        dist.broadcast(y := torch.tensor([float(rank)]), turn % ranks)
        works.append(dist.reduce_scatter_tensor(z := torch.empty(9000), noise(rank, ranks * 9000), async_op=True))
        dist.all_reduce(w := torch.ones(5))
        for work in works:
            work.wait()
        found += [x, y, z, w]
    return found


@pytest.mark.parametrize("codes", ("all_reduce,reduce_scatter", "all_reduce", ""))
def test_what_is_coded_and_what_is_not_do_not_meet(
    codes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_CODES", codes)
    ours = values(2, tmp_path / "tq", mixed, backend="tq")
    theirs = values(2, tmp_path / "gloo", mixed)
    for rank in range(2):
        for one, other in zip(ours[rank], theirs[rank], strict=True):
            assert (one - other).norm() <= 0.16 * other.norm()


def together(rank: int, ranks: int) -> dict[str, Any]:
    """As Megatron-core's buckets call them: several at once, asynchronous."""
    sums = [noise(rank, 9000), noise(rank + 5, 5000), noise(rank, 10)]
    parts = [torch.empty(8000), torch.empty(4500)]
    with torch.distributed._coalescing_manager(async_ops=True) as several:
        for x in sums:
            dist.all_reduce(x)
    several.wait()
    with torch.distributed._coalescing_manager(async_ops=True) as several:
        for number, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, noise(rank + 9 * number, ranks * len(part)))
    several.wait()
    lines = [line.split() for line in tq.backend.report().splitlines()[1:]]
    return {"sums": sums, "parts": parts, "coded": {line[1]: int(line[3]) for line in lines if line[0] == "0"}}


@pytest.mark.parametrize("codes", ("all_reduce,reduce_scatter", ""))
@pytest.mark.parametrize("warmup", ("0", "3"))
def test_several_at_once(codes: str, warmup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CODES", codes)
    monkeypatch.setenv("TQ_WARMUP", warmup)
    found = values(2, tmp_path, together, backend="tq")
    coded = bool(codes) and warmup == "0"
    for number, (numel, first) in enumerate(((9000, 0), (5000, 5), (10, 0))):
        exact = noise(first, numel) + noise(first + 1, numel)
        assert torch.equal(found[0]["sums"][number], found[1]["sums"][number])
        error = (found[0]["sums"][number] - exact).norm() / exact.norm()
        assert (0.02 < error < 0.2) if coded else error < 1e-6
    for number, numel in enumerate((16_000, 9000)):
        exact = noise(9 * number, numel) + noise(9 * number + 1, numel)
        error = (torch.cat([each["parts"][number] for each in found]) - exact).norm() / exact.norm()
        assert (0.02 < error < 0.2) if coded else error < 1e-6
    assert found[0]["coded"] == {"all_reduce": int(coded), "reduce_scatter": 2 * coded}


def in_a_subgroup(rank: int, ranks: int) -> dict[str, Any]:
    first = dist.new_group([0, 1], backend="tq")
    x = noise(rank, 9000)
    if rank < 2:
        dist.all_reduce(x, group=first)
    return {"x": x, "names": len(tq.backend.groups())}


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    found = values(3, tmp_path, in_a_subgroup)
    exact = noise(0, 9000) + noise(1, 9000)
    assert torch.equal(found[0]["x"], found[1]["x"]) and torch.equal(found[2]["x"], noise(2, 9000))
    assert 0.02 < (found[0]["x"] - exact).norm() / exact.norm() < 0.16
    assert [each["names"] for each in found] == [1, 1, 0]


def resumed(rank: int, ranks: int) -> list[Tensor]:
    found = []
    for calls in (0, 5, 5):
        tq.backend.load_state_dict({"0": calls})
        dist.all_reduce(x := noise(rank, 9000))
        found.append(x)
    with pytest.raises(KeyError, match="there is no group 'other'"):
        tq.backend.load_state_dict({"other": 1})
    return found


def test_the_seeds_resume(tmp_path: Path) -> None:
    first, second, again = values(2, tmp_path, resumed, backend="tq")[0]
    assert torch.equal(second, again) and not torch.equal(first, second)


def warmed(rank: int, ranks: int) -> dict[str, Any]:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    optimizer, found = torch.optim.SGD([weight], 0.1), []
    for _ in range(3):
        for _ in range(2):  # two sums a step
            dist.all_reduce(x := noise(rank, 9000))
            found.append(x)
        if len(found) == 2:
            said = tq.backend.report().splitlines()[-1]
        for _ in range(1 if rank == 0 else rank * 3):  # only rank 0 counts, and a step without a sum is none
            optimizer.step()
            optimizer.step()
    return {"sums": found, "said": said, "calls": tq.backend.state_dict()}


def test_the_sums_of_the_first_steps_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_WARMUP", "2")
    exact = noise(0, 9000) + noise(1, 9000) + noise(2, 9000)
    found = values(3, tmp_path, warmed, backend="tq")
    for each in found:
        assert [torch.allclose(x, exact, atol=1e-5) for x in each["sums"]] == [True] * 4 + [False] * 2
        assert torch.equal(each["sums"][-1], found[0]["sums"][-1]) and each["calls"] == {"0": 2}
        assert each["said"] == "group 0: sums are exact for 2 steps, of which 0 are over"


def goes_on(rank: int, ranks: int) -> list[Tensor]:
    found = []
    for calls in (7, 0):
        tq.backend.load_state_dict({"0": calls})
        dist.all_reduce(x := noise(rank, 9000))
        found.append(x)
    return found


def test_a_run_that_goes_on_has_no_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_WARMUP", "2")
    later, anew = values(2, tmp_path, goes_on, backend="tq")[0]
    exact = noise(0, 9000) + noise(1, 9000)
    assert not torch.allclose(later, exact, atol=1e-5) and torch.allclose(anew, exact, atol=1e-5)


def not_finite(rank: int, ranks: int) -> Tensor:
    x = noise(rank, 9000)
    x[3] = float("nan") if rank else float("inf")
    dist.all_reduce(x)
    return x


def test_what_is_not_finite_stays_so(tmp_path: Path) -> None:
    found = values(2, tmp_path, not_finite, backend="tq")
    assert not torch.isfinite(found[0][3]) and torch.isfinite(found[0][1000:]).all()


def slow_caller(rank: int, ranks: int) -> list[float]:
    """Seconds until an asynchronous call returns, and until it ends."""
    x = noise(rank, 4_000_000)
    dist.all_reduce(noise(rank, 9000))
    dist.barrier()
    began = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    returned = time.perf_counter() - began
    work.wait()
    return [returned, time.perf_counter() - began]


def test_an_asynchronous_call_returns_at_once(tmp_path: Path) -> None:
    for returned, ended in values(2, tmp_path, slow_caller, backend="tq"):
        assert returned < ended / 2


def test_one_rank_alone() -> None:
    dist.init_process_group("tq", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        dist.all_reduce(x := noise(1, 10_000))
        assert torch.equal(x, noise(1, 10_000)) and dist.get_backend() == "tq"
        assert list(tq.backend.groups()) == ["0"] and tq.backend.groups()["0"].config == Config(Codec(4), warmup=0)
    finally:
        dist.destroy_process_group()
    assert tq.backend.groups() == {}

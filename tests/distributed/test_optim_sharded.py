"""Parameters sharded by FSDP2: each rank keeps the state of its shards, and a checkpoint goes on on other ranks."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.helpers import values
from tq.quant.bounds import unbiased_nmse
from tq.train.optim import TurboQuantAdamW

EVEN, UNEVEN = (64, 1024, 4, 4), (64, 1026, 4, 3)  # of the last layer the fourth rank has nothing
BATCH, NORM = 16, 0.05
RUNS = [(UNEVEN, None), (UNEVEN, (4, 8)), (EVEN, (4, 8))]


def model_of(sizes: tuple[int, ...], sharded: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: nn.Module, bits: tuple[int, int] | None, **settings: Any) -> TurboQuantAdamW:
    settings = {"lr": 1e-3, "variant": "local", "max_norm": NORM, **settings}
    return TurboQuantAdamW(model.parameters(), state=bits, **settings)


def backward(model: nn.Module, step: int, rank: int = 0, ranks: int = 1) -> float:
    """The gradient of this rank's share of the batch; the mean loss of all."""
    x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    loss = (model(x)[:, :3] - x[:, :3].sin()).square().mean()
    loss.backward()
    total = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(total)
    return total.item() / ranks


def train(model: nn.Module, optimizer: TurboQuantAdamW, start: int, end: int, place: tuple[int, int] = (0, 1)) -> Any:
    losses = []
    for step in range(start, end):
        optimizer.zero_grad()
        losses.append(backward(model, step, *place))
        optimizer.step()
    return losses


def full(tensors: Any) -> list[Tensor]:
    found = [t.full_tensor() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]
    return [t.clone() for t in found]


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def moments(model: nn.Module, optimizer: TurboQuantAdamW) -> list[Tensor]:
    return full(t for p in model.parameters() for t in optimizer.moments(p))


def sharded_runs(rank: int, ranks: int, steps: int) -> list[Any]:
    found = []
    for sizes, bits in RUNS:
        model = model_of(sizes, sharded=True)
        optimizer = optimizer_of(model, bits)
        losses = train(model, optimizer, 0, steps, (rank, ranks))
        found.append((losses, optimizer.state_nbytes, full(model.parameters())))
    return found


@cache
def single(sizes: tuple[int, ...], bits: tuple[int, int] | None, bucket: int = 1 << 22) -> tuple[Any, int, Any]:
    model = model_of(sizes)
    optimizer = optimizer_of(model, bits, bucket_elements=bucket)
    return train(model, optimizer, 0, 50), optimizer.state_nbytes, full(model.parameters())


@pytest.mark.parametrize(("ranks", "steps"), ((2, 10), (4, 50)))
def test_losses_are_those_of_one_process_and_each_rank_keeps_its_share(ranks: int, steps: int, tmp_path: Path) -> None:
    found = values(ranks, tmp_path, sharded_runs, steps)
    for number, (sizes, bits) in enumerate(RUNS):
        alone, nbytes, weights = single(sizes, bits)
        for rank in range(ranks):
            losses, kept, after = found[rank][number]
            assert losses == found[0][number][0] and kept == pytest.approx(nbytes / ranks, rel=0.02)
            if bits is None:
                assert losses == pytest.approx(alone[:steps], rel=1e-4)
            else:  # noise: what a code costs, and what other blocks change, in one process
                runs = [single(sizes, None)[0], *(single(sizes, bits, bucket)[0] for bucket in (1, 20_000))]
                noise = max(abs(a - b) for run in runs for a, b in zip(run, alone, strict=True))
                assert max(abs(a - b) for a, b in zip(losses, alone, strict=False)) < 2 * noise < 0.05 * alone[0]
            if steps == 50:
                assert losses[-1] < 0.7 * losses[0]
            if steps == 50 and bits is None:
                assert (flat(after) - flat(weights)).norm() < 1e-4 * flat(weights).norm()


def refused(rank: int, ranks: int) -> dict[str, Any]:
    model = model_of(UNEVEN, sharded=True)
    said = {}
    for variant in (None, "exact", "momentum-ef"):
        try:
            optimizer_of(model, None, variant=variant, warmup=1)
        except ValueError as error:
            said[str(variant)] = str(error)
    optimizer, other = optimizer_of(model, (4, 8)), torch.amp.GradScaler("cpu", init_scale=4.0)
    train(model, optimizer, 0, 2, (rank, ranks))
    before, kept = full(model.parameters()), moments(model, optimizer)
    optimizer.zero_grad()
    backward(model, 2, rank, ranks)
    if rank == ranks - 1:
        model[0].weight.grad.to_local()[0, 0] = math.inf
    try:
        optimizer.step()
    except FloatingPointError as error:
        said["inf"] = str(error)
    other.scale(torch.zeros(()))
    other.step(optimizer)
    other.update()
    unchanged = [torch.equal(x, y) for x, y in zip(before, full(model.parameters()), strict=True)]
    unchanged += [torch.equal(x, y) for x, y in zip(kept, moments(model, optimizer), strict=True)]
    return {**said, "scale": other.get_scale(), "unchanged": all(unchanged), "steps": optimizer.steps_done}


def test_what_does_not_go_with_shards_is_refused_and_an_overflow_stops_every_rank(tmp_path: Path) -> None:
    found = values(2, tmp_path, refused)
    for rank, said in enumerate(found):
        for variant, name in ((None, "gradient"), ("exact", "exact"), ("momentum-ef", "momentum-ef")):
            assert "variant must be 'local' with sharded parameters" in said[str(variant)]
            assert said[str(variant)].endswith(f"got '{name}'")
        assert said["unchanged"] and said["steps"] == 2 and said["scale"] == 2.0  # of every rank
        expected = "the gradient of parameter 0 of group 0" if rank == 1 else "another rank's gradient is not finite"
        assert expected in said["inf"] and "nothing was changed" in said["inf"]


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------

CUT = 5  # steps before the checkpoint
KINDS = {"fp32": None, "coded": (4, 8)}


def saved(rank: int, ranks: int, folder: str, whole: bool) -> dict[str, Any]:
    """Saves after CUT steps and goes on. whole: the optimizer's own dictionary, not through torch's functions."""
    found = {}
    for kind, bits in KINDS.items():
        model = model_of(UNEVEN, sharded=True)
        optimizer = optimizer_of(model, bits, bucket_elements=100_000)
        train(model, optimizer, 0, CUT, (rank, ranks))
        optimizer.zero_grad()  # torch steps an optimizer that has neither gradients nor state
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optim": optimizer.state_dict() if whole else state}
        dcp.save(content, checkpoint_id=f"{folder}/{kind}")
        at_cut = full(model.parameters()), moments(model, optimizer)
        train(model, optimizer, CUT, CUT + 3, (rank, ranks))
        found[kind] = *at_cut, full(model.parameters()), optimizer.steps_done
    return found


def loaded(rank: int, ranks: int, folder: str, whole: bool, sharded: bool = True) -> dict[str, Any]:
    found = {}
    for kind, bits in KINDS.items():
        model = model_of(UNEVEN, sharded, seed=1)
        optimizer = optimizer_of(model, bits, bucket_elements=100_000)
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optim": optimizer.state_dict() if whole else state}
        dcp.load(content, checkpoint_id=f"{folder}/{kind}", no_dist=not sharded)
        if whole:
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optim"])
        else:
            set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"])
        at_cut = full(model.parameters()), moments(model, optimizer)
        train(model, optimizer, CUT, CUT + 3, (rank, ranks))
        found[kind] = *at_cut, full(model.parameters()), optimizer.steps_done
    return found


@pytest.mark.parametrize("whole", (False, True))
def test_a_checkpoint_of_four_ranks_goes_on_on_one_two_and_four(whole: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    first = values(4, tmp_path / "4", saved, folder, whole)[0]
    numbers = (2, 4) if whole else (1, 2, 4)
    runs = {ranks: values(ranks, tmp_path / f"to{ranks}", loaded, folder, whole)[0] for ranks in numbers}
    if not whole:
        with pytest.warns(UserWarning, match="load in a single process"):
            runs[0] = loaded(0, 1, folder, whole, sharded=False)  # a process without FSDP or group
    for ranks, run in runs.items():
        for kind, bits in KINDS.items():
            weights, state, after, steps = first[kind]
            assert run[kind][3] == steps == CUT + 3
            assert all(torch.equal(x, y) for x, y in zip(weights, run[kind][0], strict=True))
            pairs = list(zip(state, run[kind][1], strict=True))
            if bits is None or ranks == 4:  # exact in fp32; and where the blocks are the same
                assert all(torch.equal(x, y) for x, y in pairs)
            else:
                # of all, as a block may hold the end of one parameter and the beginning of the next
                (m, m_new), (v, v_new) = ([flat(of) for of in zip(*pairs[k::2], strict=True)] for k in range(2))
                assert 0 < (m - m_new).norm() < 1.2 * unbiased_nmse(bits[0]) ** 0.5 * m.norm()
                assert (v - v_new).norm() < 0.1 * v.norm()  # once more on a scale of 255 levels
            distances = [(x - y).norm() / y.norm() for x, y in zip(run[kind][2], after, strict=True)]
            bound = 0.0 if ranks == 4 else 1e-4 if bits is None else 0.02
            assert max(distances) <= bound


def gathered_and_in_the_background(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    model = model_of(UNEVEN, sharded=True)
    optimizer = optimizer_of(model, (4, 8))
    train(model, optimizer, 0, 3, (rank, ranks))
    optimizer.zero_grad()
    kept = moments(model, optimizer)
    # all of it on rank 0, and from there to everybody
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_optimizer_state_dict(model, optimizer, options=options)
    names = [name for name, _ in model.named_parameters()]
    entries = [whole["state"][name][key] for name in names for key in ("exp_avg", "exp_avg_sq")] if whole else kept
    found = {"gathered": all(torch.equal(x, y) for x, y in zip(entries, kept, strict=True))}
    again = optimizer_of(other := model_of(UNEVEN, sharded=True, seed=1), (4, 8))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, again, whole, options=options)
    found["spread"] = [moments(other, again), kept]
    # saved by a thread while training goes on
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    train(model, optimizer, 3, 6, (rank, ranks))
    saving.result()  # type: ignore[union-attr]
    again = optimizer_of(other, (4, 8))
    state = {"optim": get_optimizer_state_dict(other, again)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other, again, state["optim"])
    found["background"] = all(torch.equal(x, y) for x, y in zip(moments(other, again), kept, strict=True))
    return found


def test_a_state_is_gathered_spread_and_saved_in_the_background(tmp_path: Path) -> None:
    for found in values(2, tmp_path, gathered_and_in_the_background, str(tmp_path / "checkpoint")):
        assert found["gathered"] and found["background"]
        for new, old in zip(*found["spread"], strict=True):
            assert (new - old).norm() < 0.1 * old.norm()

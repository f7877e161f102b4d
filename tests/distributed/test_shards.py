"""DTensors in a rank's own file: shards of them, and their place in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tests.distributed.helpers import values
from tq.train import tqk
from tq.train.tqk import shards


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def dtensor(mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(torch.arange(12.0).view(3, 4), mesh, [placement], run_check=False)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_what_was_sharded_is_sharded_again(mesh: DeviceMesh, placement: Placement, tmp_path: Path) -> None:
    one, other = dtensor(mesh, placement), torch.ones(2)
    state = {"a": {3: [one, other]}, "b": (one, "text"), "c": None}
    local, layouts = shards.taken_apart(state)
    tqk.save(tmp_path / "file", [local, layouts])
    local, layouts = tqk.load(tmp_path / "file")
    found: Any = shards.put_together(local, layouts, mesh)
    for back in (found["a"][3][0], found["b"][0]):
        assert back.placements == one.placements and back.shape == one.shape and back.stride() == one.stride()
        assert torch.equal(back.to_local(), one.to_local())
    assert torch.equal(found["a"][3][1], other) and found["b"][1] == "text" and found["c"] is None
    assert type(found["b"]) is tuple and not layouts[0][0] == layouts[1][0]


def unevenly(rank: int, ranks: int, folder: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(35.0).view(7, 5)
    one = torch.distributed.tensor.distribute_tensor(whole, mesh, [Shard(0)])
    local, layouts = shards.taken_apart([one])
    tqk.save(f"{folder}/{rank}", [local, layouts])
    local, layouts = tqk.load(f"{folder}/{rank}")
    back = shards.put_together(local, layouts, mesh)[0]
    return [list(back.to_local().shape), list(back.shape), torch.equal(back.full_tensor(), whole)]


def test_shards_of_uneven_sizes(tmp_path: Path) -> None:
    assert values(3, tmp_path, unevenly, str(tmp_path)) == [[[rows, 5], [7, 5], True] for rows in (3, 3, 1)]


def test_what_has_no_shards_stays_as_it_is(mesh: DeviceMesh) -> None:
    state = {"a": [torch.ones(2), 3.5], "b": (1, 2)}
    assert shards.taken_apart(state) == (state, []) and shards.put_together(state, [], None) == state


def test_errors(mesh: DeviceMesh) -> None:
    with pytest.raises(TypeError, match=r"cannot hold P\(sum\) \(at model/weight\)|cannot hold Partial"):
        shards.taken_apart({"model": {"weight": dtensor(mesh, Partial())}})
    local, layouts = shards.taken_apart({"weight": dtensor(mesh, Shard(0))})
    with pytest.raises(ValueError, match=r"mesh of \[1\], here no parameter is sharded"):
        shards.put_together(local, layouts, None)
    path, shape, stride, placements, _ = layouts[0]
    with pytest.raises(ValueError, match=r"mesh of \[2\], here \[1\]"):
        shards.put_together(local, [[path, shape, stride, placements, [2]]], mesh)
    for wrong in ([path, shape, stride, ["shard -1"], [1]], [path, None, stride, placements, [1]], [path], 3):
        with pytest.raises(ValueError, match="placement|layout"):
            shards.put_together(local, [wrong], mesh)

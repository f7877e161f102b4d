"""DTensors in the file of one rank: its own shards, and beside them how these lie in the whole.

For the file that a rank writes for itself and reads again on as many ranks. For other numbers of ranks see
``tq.train.tqk.dcp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

Path = tuple[Any, ...]


def taken_apart(state: Any) -> tuple[Any, list[Any]]:
    """(``state`` with this rank's shard in the place of every DTensor, for each of them how it lies in the whole).

    Raises:
        TypeError: for a placement other than ``Shard`` and ``Replicate``.
    """
    layouts: list[Any] = []

    def local(value: Any, path: Path) -> Any:
        if not isinstance(value, DTensor):
            return value
        placements = [_text(placement, path) for placement in value.placements]
        layouts.append([list(path), list(value.shape), list(value.stride()), placements, list(value.device_mesh.shape)])
        return value.to_local()

    return _each(state, (), local), layouts


def put_together(state: Any, layouts: list[Any], mesh: DeviceMesh | None) -> Any:
    """The inverse of ``taken_apart`` on the ranks of ``mesh``.

    Raises:
        ValueError: where there is no mesh or one of another shape, and for what ``taken_apart`` never gives.
    """
    try:
        lying = {tuple(path): (shape, stride, placements, ranks) for path, shape, stride, placements, ranks in layouts}
    except (TypeError, ValueError) as error:
        raise ValueError(f"no layouts of shards: {str(layouts)[:80]}") from error
    found = None if mesh is None else list(mesh.shape)
    for *_, ranks in lying.values():
        if ranks != found:
            raise ValueError(f"shards of ranks in a mesh of {ranks}, here {found or 'no parameter is sharded'}")

    def in_the_whole(value: Any, path: Path) -> Any:
        if path not in lying or mesh is None:
            return value
        shape, stride, placements, _ = lying[path]
        try:
            return DTensor.from_local(
                value, mesh, [_placement(each) for each in placements], run_check=False,
                shape=torch.Size(shape), stride=tuple(stride),
            )  # fmt: skip
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"no layout of a shard: {str(lying[path])[:80]}") from error

    return _each(state, (), in_the_whole)


def _each(value: Any, path: Path, change: Callable[[Tensor, Path], Any]) -> Any:
    """``value`` with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, Mapping):
        return {key: _each(inner, (*path, key), change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inside = [_each(inner, (*path, number), change) for number, inner in enumerate(value)]
        return inside if isinstance(value, list) else tuple(inside)
    return value


def _text(placement: Placement, path: Path) -> str:
    if type(placement) is Shard:
        return f"shard {placement.dim}"
    if type(placement) is Replicate:
        return "replicate"
    raise TypeError(f"a rank's own file cannot hold {placement} (at {'/'.join(map(str, path))})")


def _placement(text: str) -> Placement:
    if text == "replicate":
        return Replicate()
    if found := re.fullmatch(r"shard (\d+)", text):
        return Shard(int(found[1]))
    raise ValueError(f"no placement: {text!r}")

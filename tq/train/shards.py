"""Which rank this is and what it holds: of FSDP2's parameters and gradients, which are DTensors, a shard."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def rank_and_size(group: dist.ProcessGroup | None, simulated: tuple[int, int] | None = None) -> tuple[int, int]:
    """(rank, ranks) in a group (None: all ranks), as simulated in one process where that is given; (0, 1) alone."""
    if simulated is not None:
        return simulated
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def local(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, another tensor itself; shares its memory."""
    own = x.detach()
    return own.to_local() if isinstance(own, DTensor) else own


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's shard of the gradient, laid out as that of the parameter; None if there is no gradient."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:  # a collective: as the placements are, it is on every rank
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return None if gradient is None else local(gradient)


def sharded_like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A shard as a DTensor laid out as the parameter is; as it is where the parameter is no DTensor."""
    if not isinstance(parameter, DTensor):
        return shard
    stride = torch.empty(parameter.shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients, those of DTensors over their whole mesh; 0 where there are none.

    A scalar, the same on all ranks of the meshes, on which it is to be called with the same parameters.
    """
    kinds: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}  # by the groups over which they are sharded
    for parameter in parameters:
        kinds.setdefault(_sharded_over(parameter), []).append(parameter)
    norms = [_norm_over(groups, members) for groups, members in kinds.items()]
    if len(norms) == 1:
        return norms[0]
    return torch.stack([norm.double() for norm in norms]).norm() if norms else torch.zeros(())


def _norm_over(groups: tuple[dist.ProcessGroup, ...], parameters: list[Tensor]) -> Tensor:
    found = [local_gradient(parameter) for parameter in parameters]
    dense = [gradient for gradient in found if gradient is not None and gradient.layout == torch.strided]
    wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in dense) else torch.float32
    norm = torch.zeros((), device=parameters[0].device)
    if dense:
        norm = torch.stack(torch._foreach_norm(dense, dtype=wide)).norm()
    for group in groups:  # also where this rank has no gradient: the others wait for it
        square = norm.double().square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    return norm


def _sharded_over(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    sharded = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return tuple(parameter.device_mesh.get_group(dim) for dim in sharded)


def shard_of(x: Tensor, parameter: Tensor) -> Tensor:
    """What a rank holds of x, which has the shape of the parameter, where the parameter is laid out as it is."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        if not isinstance(x, DTensor):
            x = distribute_tensor(x, mesh, placements, src_data_rank=None)
        elif x.placements != placements or x.device_mesh != mesh:
            x = x.redistribute(mesh, placements)
    elif isinstance(x, DTensor):
        x = x.full_tensor()
    return local(x)

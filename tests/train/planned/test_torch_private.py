"""Canaries: the private names of torch that the planner uses still mean what they meant."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tq.train.planned import _torch_private as private


def test_backward_and_its_node() -> None:
    seen = []

    def unpack(x: Tensor) -> Tensor:
        node = private.running_node()
        seen.append((private.in_backward(), node.name(), private.sequence_number(node)))
        return x

    x = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda x: x, unpack):
        y = x.exp().sin().sum()
    assert not private.in_backward() and private.running_node() is None
    y.backward()
    assert [entry[:2] for entry in seen] == [(True, "SinBackward0"), (True, "ExpBackward0")]
    assert seen[0][2] > seen[1][2]


def test_arguments_that_are_written_to() -> None:
    aten = torch.ops.aten
    assert private.written(aten.add_.Scalar) == ("self",) and private.written(aten.add.Tensor) == ()
    assert private.argument_names(aten.mm.default) == ("self", "mat2")

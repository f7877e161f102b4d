"""Canaries: each private name of torch that is used still means what it meant, and none is used elsewhere."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tq.train import _pipelining
from tq.train import _torch_private as private


def node(tensor: Tensor) -> str:
    return type(tensor.grad_fn).__name__


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_the_names_of_nodes_that_keep_the_order(x: Tensor) -> None:
    assert (node(x.view(2, 8)), node(x.to(torch.bfloat16))) == private.KEEP_ORDER


def test_the_names_of_views(x: Tensor) -> None:
    made = [
        x.view(16), x.to(torch.bfloat16), x.split(2)[0], x.split([1, 3])[0], x[1:3], x[0], x.t(), x.transpose(0, 1),
        x.permute(1, 0), torch.ops.aten.alias(x),
    ]  # fmt: skip
    assert {node(tensor) for tensor in made} == set(private.VIEWS)


def test_the_names_of_softmax_relu_and_leaf(x: Tensor) -> None:
    assert (node(x.softmax(-1)), node(torch._safe_softmax(x, -1))) == private.SOFTMAX
    assert node(x.relu()) == private.RELU
    assert type(x.t().grad_fn.next_functions[0][0]).__name__ == private.LEAF


def test_the_hooks_on_top() -> None:
    def keep(tensor: Tensor) -> Tensor:
        return tensor

    assert private.saved_tensors_hooks() is None
    with saved_tensors_hooks(keep, keep):
        assert private.saved_tensors_hooks() == (keep, keep)
    assert private.saved_tensors_hooks() is None


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_the_youngest_node_of_a_function(x: Tensor) -> None:
    y = Own.apply(x)
    assert private.is_youngest(y.grad_fn)
    z = x * 2
    assert not private.is_youngest(y.grad_fn) and not private.is_youngest(z.grad_fn)


def test_versions_count_changes_in_place() -> None:
    y = torch.zeros(3)
    before = private.version(y)
    y.add_(1)
    assert private.version(y) == before + 1
    with torch.inference_mode():
        assert private.version(torch.zeros(3)) == 0


def test_a_storage_is_named_for_all_its_views_and_no_other(x: Tensor) -> None:
    assert private.storage(x) == private.storage(x[1:].t()) != private.storage(x.clone())


def test_a_tensor_without_memory_sees_operations_and_what_they_change() -> None:
    seen: dict[str, bool] = {}

    class Bare(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen[func.__name__] = private.is_mutable(func)
            return args[0]

    bare = private.wrapper(Bare, (2, 3), torch.float32, torch.device("cpu"))
    assert type(bare) is Bare and bare.shape == (2, 3) and bare.dtype == torch.float32 and bare.data_ptr() == 0
    bare.add(1)
    bare.add_(1)
    bare.copy_(torch.zeros(2, 3))
    assert seen == {"add.Tensor": False, "add_.Tensor": True, "copy_.default": True}


def test_a_function_that_hides_its_inside_is_made_to_show_it(x: Tensor) -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    attention = F.multi_head_attention_forward
    inside = private.transparent(attention)
    assert inside is not None and private.transparent(torch.add) is None and private.transparent(node) is None
    weights = [torch.randn(*size, requires_grad=True) for size in ((12, 4), (12,), (4, 4), (4,))]
    given = x, x, x, 4, 2, *weights[:2], None, None, False, 0.0, *weights[2:]
    with Names() as hidden:
        expected, _ = attention(*given)
    with Names() as shown:
        found, _ = inside(*given)
    assert torch.equal(found, expected)
    assert hidden.seen == ["multi_head_attention_forward"] and "linear" in shown.seen


def test_a_mode_sees_operations_below_autograd_and_may_answer_for_them(x: Tensor) -> None:
    class Mode(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return args[0].new_ones(4, 4) if func is torch.ops.aten.mm.default else func(*args, **(kwargs or {}))

    seen: list[object] = []
    with Mode():
        y = F.linear(x, x)
    assert torch.ops.aten.mm.default in seen and (y == 1).all() and node(y) == "MmBackward0"


def test_the_timeout_of_a_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert private.timeout(dist.group.WORLD, torch.device("cpu")) == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


def test_a_group_has_a_name_that_finds_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.distributed_c10d.GroupMember.WORLD
        assert _pipelining.group_named(group.group_name) is group
    finally:
        dist.destroy_process_group()


def test_the_class_of_operations_which_the_documents_of_torch_name_says_what_they_take_and_give() -> None:
    operation = torch.ops.aten.add_.Tensor
    assert isinstance(operation, torch._ops.OpOverload) and not isinstance(torch.add, torch._ops.OpOverload)
    assert operation._schema.is_mutable and not torch.ops.aten.mm.default._schema.is_mutable
    assert [argument.name for argument in operation._schema.arguments] == ["self", "other", "alpha"]


def test_no_private_name_is_used_elsewhere() -> None:
    folder = Path(private.__file__).parent
    names = "cdata|version|sequence_nr|get_backend"
    pattern = re.compile(rf"\b(?:torch|dist)(?:\.\w+)*\._(?!foreach_|_|ops\.OpOverload\b)\w+|\._(?:{names})\b")
    found = [
        f"{path.name}: {hit}"
        for path in folder.rglob("*.py")
        if path.name not in ("_torch_private.py", "_torch_partition.py", "_pipelining.py")
        for hit in pattern.findall(path.read_text())
    ]
    assert not found

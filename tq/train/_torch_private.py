"""Every use of a name that PyTorch keeps to itself, each held by a test of its own, where a new version is seen.

Written against torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees every operation below autograd

__all__ = [
    "DispatchMode", "KEEP_ORDER", "LEAF", "RELU", "SOFTMAX", "VIEWS", "is_mutable", "is_youngest",
    "saved_tensors_hooks", "storage", "timeout", "transparent", "version", "wrapper",
]  # fmt: skip

_T = TypeVar("_T", bound=Tensor)

# Names of the nodes that autograd records: the softmaxes of an attention without a fused kernel, what a relu leaves,
# the end of the graph at a parameter, and the views and casts of a tensor.
SOFTMAX = ("SoftmaxBackward0", "SafeSoftmaxBackward0")
RELU = "ReluBackward0"
LEAF = "AccumulateGrad"
KEEP_ORDER = ("ViewBackward0", "ToCopyBackward0")  # of the elements
_PARTS = ("SplitBackward0", "SplitWithSizesBackward0", "SliceBackward0", "SelectBackward0")
VIEWS = (*KEEP_ORDER, *_PARTS, "TBackward0", "TransposeBackward0", "PermuteBackward0", "AliasBackward0")


def timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """What the backend of a group waits at most, so that a group like it can be made."""
    found: timedelta = group._get_backend(device).options._timeout
    return found


def saved_tensors_hooks() -> Any:
    """The (pack, unpack) hooks that what is saved now goes through, None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_youngest(node: Any) -> bool:
    """Whether this is the node of an ``autograd.Function``, and nothing younger is in the graph."""
    youngest = torch.autograd._get_sequence_nr() - 1
    return isinstance(node, torch.autograd.function.BackwardCFunction) and node._sequence_nr() == youngest


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; 0 under inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def storage(tensor: Tensor) -> int:
    """Names the storage of a tensor, as long as it is alive; other than its address, also where that is 0."""
    found: int = tensor.untyped_storage()._cdata
    return found


def wrapper(kind: type[_T], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _T:
    """A tensor of a subclass that has no memory of its own, only what its attributes hold."""
    made: _T = Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
    return made


def is_mutable(operation: Any) -> bool:
    """Whether an operation, as ``__torch_dispatch__`` is given it, writes to one of its arguments."""
    found: bool = operation._schema.is_mutable
    return found


def transparent(func: Any) -> Callable[..., Any] | None:
    """A function of ``torch.nn.functional`` that shows itself to a mode, as one that shows what happens inside it.

    Such a function asks ``has_torch_function`` first, a global of its module. None where it does not.
    """
    if not isinstance(func, FunctionType) or "has_torch_function" not in func.__code__.co_names:
        return None
    scope = func.__globals__ | {"has_torch_function": lambda tensors: False}
    inside = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside

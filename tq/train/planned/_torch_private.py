"""The names that PyTorch keeps to itself and the planner uses, each held by a test of its own.

Apart from ``tq.train._torch_private``, on which recordings depend. Written against torch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["in_backward", "running_node", "sequence_number", "written"]


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def running_node() -> Any:
    """The node of backward that runs in this thread; None outside backward."""
    return torch._C._current_autograd_node()


def sequence_number(node: Any) -> int:
    """Names a node of backward within one step."""
    return int(node._sequence_nr())


def written(operation: Any) -> tuple[str, ...]:
    """Names of the arguments that an operation, as ``__torch_dispatch__`` is given it, writes to."""
    return tuple(a.name for a in operation._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def argument_names(operation: Any) -> tuple[str, ...]:
    """Names of all arguments of such an operation, in their order."""
    return tuple(a.name for a in operation._schema.arguments)

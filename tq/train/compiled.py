"""An optimizer's step as one operation of a graph, so that ``torch.compile`` need not end its graph before it.

What the step reads besides weights and gradients (the state, learning rates, the number of the step) is looked up when
the operation runs: a schedule compiles nothing anew, and the bits are those of the eager step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

_numbers = itertools.count()
_optimizers: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()


def register(optimizer: Optimizer) -> int:
    """The number by which a graph finds an optimizer of this process while it lives."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


@torch.library.custom_op("tq::optimizer_step_", mutates_args=("weights",))
def _optimizer_step(number: int, weights: list[Tensor], gradients: list[Tensor | None]) -> None:
    """The step of an optimizer with these gradients; weights: those of its parameters, or copies of them."""
    optimizer = _optimizers[number]
    parameters = _parameters(optimizer)
    before = [p.grad for p in parameters]
    try:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        step: Callable[[], None] = optimizer.eager_step  # type: ignore[attr-defined]
        step()
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
    for p, weight in zip(parameters, weights, strict=True):
        if weight.data_ptr() != p.data_ptr():
            weight.copy_(p.detach())


@_optimizer_step.register_fake
def _(number: int, weights: list[Tensor], gradients: list[Tensor | None]) -> None:
    return None


def _parameters(optimizer: Any) -> list[Tensor]:
    """By way of the buckets: a graph would be held to the learning rates that stand beside them in ``param_groups``."""
    return [p for buckets in optimizer._stores for run, _ in buckets for p in run]


def step(optimizer: Optimizer, number: int) -> None:
    """What ``optimizer.step()`` is in a graph."""
    parameters = _parameters(optimizer)
    _optimizer_step(number, [p.detach() for p in parameters], [p.grad for p in parameters])

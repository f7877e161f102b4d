"""AdamW's step with all that changes from step to step on the device, so that a CUDA graph can hold it.

The host never asks the device for anything: how many steps were done, whether one is left out because a gradient
overflowed, how much gradients are clipped by, all that stays there until somebody looks at the optimizer's state.
Gradients must stay where they are between replays, or be made inside the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tq.train import fused
from tq.train.shards import gradient_norm, local, local_gradient
from tq.train.state import Run

if TYPE_CHECKING:
    from tq.train.optim import TurboQuantAdamW


class Counter:
    """Steps that the device has done and the host not yet counted, and of which parameters."""

    def __init__(self, device: torch.device) -> None:
        self.steps = torch.zeros(1, dtype=torch.int64, device=device)
        self.moving: list[list[bool]] = []  # by bucket and parameter
        self.before: list[Tensor] = []  # steps of each parameter, and of the bucket, that the host has counted

    def taken(self) -> int:
        """The number of steps, which is then zero: waits for the device."""
        taken = int(self.steps.item())
        self.steps.zero_()
        return taken


def step(optimizer: TurboQuantAdamW) -> None:
    """One step of an optimizer with ``capturable=True``. RuntimeError where the parameters are not on a GPU."""
    runs = list(optimizer._buckets())
    parameters = [p for run in runs for p in run.parameters]
    gradients = [[local_gradient(p) for p in run.parameters] for run in runs]
    found = [fused.kernels("triton", run.parameters, given) for run, given in zip(runs, gradients, strict=True)]
    device = local(parameters[0]).device
    counter = _counter(optimizer, runs, device)
    scalars = _scalars(optimizer, parameters, device)
    for number, (run, module, given) in enumerate(zip(runs, found, gradients, strict=True)):
        assert module is not None
        before = counter.before[number] + counter.steps
        fused.step_on_device(
            module, run.store, run.parameters, given, constants=_constants(run.group, before[:-1] + 1),
            done=before[-1:], scalars=scalars, seed=optimizer._weights_seed(number),
        )  # fmt: skip
    counter.steps += (scalars[2] == 0).to(torch.int64)


def _counter(optimizer: TurboQuantAdamW, runs: list[Run], device: torch.device) -> Counter:
    """The optimizer's, made anew where other parameters have gradients than before."""
    moving = [[p.grad is not None for p in run.parameters] for run in runs]
    counter = optimizer._counter
    if counter is None or counter.moving != moving:
        settle(optimizer)
        counter = optimizer._counter = Counter(device)
        counter.moving = moving
        counter.before = [torch.tensor([*run.store.steps, run.store.done]).to(device) for run in runs]
    return counter


def settle(optimizer: TurboQuantAdamW) -> None:
    """The host counts what the device has done since it last did; waits for it."""
    counter, optimizer._counter = optimizer._counter, None
    if counter is None or not (taken := counter.taken()):
        return
    optimizer.steps_done += taken
    for run, moving in zip(optimizer._buckets(), counter.moving, strict=True):
        run.store.done += taken
        run.store.steps = [n + taken * moves for n, moves in zip(run.store.steps, moving, strict=True)]


def _scalars(optimizer: TurboQuantAdamW, parameters: list[Tensor], device: torch.device) -> Tensor:
    """fp32 [3]: what gradients are divided by, what they are then multiplied by, and whether nothing is to be done."""
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    divisor = one if scale is None else scale.to(device).reshape(())
    factor = one
    if optimizer.max_norm is not None:
        norm = gradient_norm(parameters) / divisor
        factor = (optimizer.max_norm / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
    if optimizer.param_groups[0].get("maximize"):
        factor = -factor
    return torch.stack([divisor.float(), factor, zero if overflow is None else overflow.to(device).float().reshape(())])


def _constants(group: dict[str, Any], done: Tensor) -> Tensor:
    """fp32 [S, 8]: the constants of ``simd.adamw`` for parameters in their step number ``done``, in fp64 until then."""
    beta1, beta2 = group["betas"]
    done = done.double()
    lr = group["lr"].to(done).expand_as(done) if isinstance(group["lr"], Tensor) else torch.full_like(done, group["lr"])
    row = (
        torch.full_like(done, 1 - beta1), torch.full_like(done, 1 - beta2), torch.full_like(done, beta2),
        1 - lr * group["weight_decay"], -(lr / (1 - beta1**done)), (1 - beta2**done).sqrt(),
        torch.full_like(done, group["eps"]), torch.zeros_like(done),
    )  # fmt: skip
    return torch.stack(row, 1).float()

"""AdamW's step with all that changes from step to step on the device, so that a CUDA graph can hold it.

The host never asks the device for anything: how many steps were done, whether one is left out because a gradient
overflowed, how much gradients are clipped by, all that stays there until somebody looks at the optimizer's state.

A graph keeps what it was captured with: which parameters have gradients and where these lie, and every hyperparameter
that is a number (a learning rate that is a tensor on the device is read anew at each replay). At least one step must
have been done before, in which kernels are compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tq.train import fused
from tq.train.adamw import check_dense
from tq.train.shards import gradient_norm, local, local_gradient

if TYPE_CHECKING:
    from tq.train.optim import TurboQuantAdamW


class Counter:
    """How many steps were done, as the device counts them: int64 tensors that stay where they are.

    steps: [1], of the optimizer; buckets: [S + 1] each, of its S parameters and of itself.
    """

    def __init__(self, optimizer: TurboQuantAdamW, device: torch.device) -> None:
        self.device = device
        self.steps = torch.zeros(1, dtype=torch.int64, device=device)
        self.buckets: list[Tensor] = []
        self._moves: dict[tuple[bool, ...], Tensor] = {}
        self.set(optimizer)

    def set(self, optimizer: TurboQuantAdamW) -> None:
        """The device counts on from where the host is."""
        self.steps.fill_(optimizer._steps_done)
        for number, run in enumerate(optimizer._buckets()):
            counted = torch.tensor([*run.store.steps, run.store.done], dtype=torch.int64)
            if number < len(self.buckets):
                self.buckets[number].copy_(counted)
            else:
                self.buckets.append(counted.to(self.device))

    def moves(self, has_gradient: tuple[bool, ...]) -> Tensor:
        """int64 [S + 1]: what a step adds to a bucket's counts; kept for good, as graphs may read it."""
        if has_gradient not in self._moves:
            self._moves[has_gradient] = torch.tensor([*has_gradient, True], dtype=torch.int64).to(self.device)
        return self._moves[has_gradient]


class _Shared(NamedTuple):
    """fp32 scalars of a step on the device: what gradients are divided by and then multiplied by; not 0: no step."""

    divisor: Tensor
    factor: Tensor
    left_out: Tensor


def step(optimizer: TurboQuantAdamW) -> None:
    """One step of an optimizer with ``capturable=True``. RuntimeError where the parameters are not on a GPU."""
    runs = list(optimizer._buckets())
    parameters = [p for run in runs for p in run.parameters]
    check_dense(parameters)
    gradients = [[local_gradient(p) for p in run.parameters] for run in runs]
    found = [fused.kernels("triton", run.parameters, given) for run, given in zip(runs, gradients, strict=True)]
    device = local(parameters[0]).device
    if optimizer._counter is None:
        optimizer._counter = Counter(optimizer, device)
    counter, shared = optimizer._counter, _shared(optimizer, parameters, device)
    counts = (shared.left_out == 0).to(torch.int64)
    for number, (run, module, given) in enumerate(zip(runs, found, gradients, strict=True)):
        assert module is not None
        done = counter.buckets[number]
        factor = -shared.factor if run.group.get("maximize") else shared.factor
        fused.step_on_device(
            module, run.store, run.parameters, given, constants=_constants(run.group, done[:-1] + 1), done=done[-1:],
            scalars=torch.stack([shared.divisor, factor, shared.left_out]), seed=optimizer._weights_seed(number),
        )  # fmt: skip
        done += counts * counter.moves(tuple(g is not None for g in given))
    counter.steps += counts


def settle(optimizer: TurboQuantAdamW) -> None:
    """The host counts what the device has done; waits for it."""
    counter = optimizer._counter
    if counter is None:
        return
    steps_done, *counted = torch.cat([counter.steps, *counter.buckets]).tolist()
    optimizer._steps_done = steps_done
    for run in optimizer._buckets():
        size = len(run.store.steps)
        run.store.steps, run.store.done = counted[:size], counted[size]
        del counted[: size + 1]


def _shared(optimizer: TurboQuantAdamW, parameters: list[Tensor], device: torch.device) -> _Shared:
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    one, left_out = torch.ones((), dtype=torch.float32, device=device), torch.zeros((), device=device) != 0
    divisor = one if scale is None else scale.to(device).reshape(()).float()
    if overflow is not None:
        left_out = left_out | (overflow.to(device).reshape(()) != 0)
    factor = one
    if optimizer.max_norm is not None:
        norm = gradient_norm(parameters) / divisor
        factor = (optimizer.max_norm / (norm + 1e-6)).clamp(max=1.0).float()
        left_out = left_out | ~norm.isfinite()  # nothing could be clipped to; the host may not raise here
    return _Shared(divisor, factor, left_out.float())


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

"""AdamW's step of a bucket in one pass over memory (``kernels/adamw.py``, ``kernels/gpu_adamw.py``).

The kernels cover fp32, bf16 and fp16 weights and gradients, moments in fp32 or coded, any number of parameters that
joined at different steps. What they do not cover goes the unfused way (``tq.train.adamw``), whose bits a CPU gives too;
a GPU gives them up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tq.quant import dispatch
from tq.quant.logscale import DITHER_SEED, RANGE
from tq.quant.settings import DTYPES
from tq.train.coded import BLOCK, M_SCALE, MomentCodecs
from tq.train.shards import local
from tq.train.state import MOMENTS, Store


def kernels(impl: str, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> ModuleType | None:
    """The kernels for these tensors (this rank's shards); None: the unfused path.

    RuntimeError where ``impl`` names some that cannot run.
    """
    if impl == "reference" or not parameters:
        return None
    found = dispatch.adamw_kernels(impl, local(parameters[0]).device)
    why = found if isinstance(found, str) else _why_refused(found, parameters, gradients)
    if why is not None and impl != "auto":
        raise RuntimeError(f"impl={impl!r} cannot run: {why}")
    return None if why is not None or isinstance(found, str) else found


def surely_finite(impl: str, parameters: Sequence[Tensor]) -> bool:
    """Whether the norm of these gradients is known to be finite, from their largest magnitude; False: not known."""
    found = [p.grad for p in parameters if p.grad is not None]
    module = kernels(impl, parameters, [p.grad for p in parameters]) if found else None
    if module is None or not hasattr(module, "largest"):
        return False
    if any(type(g) is not Tensor or not g.is_contiguous() for g in found):
        return False
    most: float = module.largest(found)
    return most * math.sqrt(sum(g.numel() for g in found)) < torch.finfo(torch.float32).max ** 0.5


def _why_refused(module: ModuleType, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> str | None:
    for what, tensors in (("weights", parameters), ("gradients", gradients)):
        for x in tensors:
            own = None if x is None else local(x)
            if own is not None and (own.dtype not in DTYPES or type(own) is not Tensor):
                return f"it covers {what} of fp32, bf16 and fp16 in memory, got {type(own).__name__} of {own.dtype}"
            if own is not None and what == "weights" and not own.is_contiguous():
                return f"it covers contiguous weights, got strides {own.stride()} for shape {tuple(own.shape)}"
    refused: str | None = module.why_not(parameters, gradients) if hasattr(module, "why_not") else None
    return refused


def step(
    module: ModuleType, store: Store, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None],
    group: dict[str, Any], *, divisor: float = 1.0, factor: float = 1.0, negated: bool = False, seed: int | None = None,
) -> None:  # fmt: skip
    """The parameters of a bucket move, and its moments with them; those without a gradient stay as they are.

    divisor, factor: g / divisor * factor enters, with the other sign where ``negated``; seed: of the rounding of bf16
    weights at random, None: to the nearest.
    """
    beta1, beta2 = group["betas"]
    constants = []
    for number, gradient in enumerate(gradients):
        store.steps[number] += gradient is not None
        done = max(1, store.steps[number])
        constants.append((
            1 - beta1, 1 - beta2, beta2, 1 - group["lr"] * group["weight_decay"], -(group["lr"] / (1 - beta1**done)),
            math.sqrt(1 - beta2**done), group["eps"],
        ))  # fmt: skip
    weights = [local(p) for p in parameters]
    dense = [None if g is None else g.detach().reshape(-1).contiguous() for g in gradients]
    new = store.room(weights[0].device)
    moments: Any = tuple(new[name] for name in MOMENTS) if store.codecs is None else (
        _coded(module, store.codecs, store.tensors, store.done) if store.done else None,
        _coded(module, store.codecs, new, store.done + 1),
    )  # fmt: skip
    settings = _settings(module, store.codecs, weights[0].device)
    module.step(
        weights, dense, constants, moments, settings, divisor=divisor, factor=factor, negated=negated, seed=seed
    )  # fmt: skip
    torch.autograd.graph.increment_version([w for w, g in zip(weights, dense, strict=True) if g is not None])
    store.renew(new)


def step_on_device(
    module: ModuleType, store: Store, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None],
    *, constants: Tensor, done: Tensor, scalars: Tensor, seed: int | None,
) -> None:  # fmt: skip
    """The same where all that changes from step to step lies on the device, and the state in the same memory always.

    constants: fp32 [S, 8]; done: int64 [1], steps of the bucket; scalars: of ``gpu_adamw.Clock``; seed: what the
    roundings of the weights have their seeds under.
    """
    store.fix(local(parameters[0]).device)
    weights = [local(p) for p in parameters]
    dense = [None if g is None else g.detach().reshape(-1).contiguous() for g in gradients]
    coded = None if store.codecs is None else _coded(module, store.codecs, store.tensors, None)
    moments: Any = (coded, coded) if coded is not None else tuple(store.tensors[name] for name in MOMENTS)
    module.step(
        weights, dense, constants, moments, _settings(module, store.codecs, weights[0].device), seed=seed,
        clock=module.Clock(done, scalars),
    )  # fmt: skip
    torch.autograd.graph.increment_version([w for w, g in zip(weights, dense, strict=True) if g is not None])


def _coded(module: ModuleType, codecs: MomentCodecs, tensors: dict[str, Tensor], step: int | None) -> Any:
    """The codes of m and v after ``step`` as the kernel takes them; None: with the seeds that the steps' are under."""
    codec, dither = codecs.of_m(step), DITHER_SEED if step is None else codecs.of_v().dither_seed(step)
    return module.Coded(*codecs.parts(tensors), (codec.block, codec.rounds, codec.seed), dither)


def _settings(module: ModuleType, codecs: MomentCodecs | None, device: torch.device) -> Any:
    if codecs is None:
        return None
    levels, thresholds = dispatch.codebook(codecs.bits["m"], str(device))
    return module.Settings(codecs.bits["m"], codecs.bits["v"], M_SCALE, levels, thresholds, RANGE)


assert BLOCK == 128

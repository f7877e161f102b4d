"""AdamW's step of a bucket in one pass over memory (``kernels/adamw.py``): the bits of the unfused path.

The kernel covers fp32, bf16 and fp16 weights and gradients on the CPU, moments in fp32 or coded, any number of
parameters that joined at different steps. What it does not cover goes the unfused way (``tq.train.adamw``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tq.quant import dispatch
from tq.quant.logscale import RANGE
from tq.quant.settings import DTYPES
from tq.train.coded import BLOCK, M_SCALE, MomentCodecs
from tq.train.shards import local
from tq.train.state import MOMENTS, Store


def kernels(impl: str, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> ModuleType | None:
    """The kernels for these tensors (this rank's shards); None: the unfused path. RuntimeError with impl="cpu" then."""
    if impl == "reference" or not parameters:
        return None
    found = dispatch.adamw_kernels(local(parameters[0]).device)
    why = found if isinstance(found, str) else _why_refused(parameters, gradients)
    if why is not None and impl == "cpu":
        raise RuntimeError(f"impl='cpu' cannot run: {why}")
    return None if why is not None or isinstance(found, str) else found


def surely_finite(impl: str, parameters: Sequence[Tensor]) -> bool:
    """Whether the norm of these gradients is known to be finite, from their largest magnitude; False: not known."""
    found = [p.grad for p in parameters if p.grad is not None]
    module = kernels(impl, parameters, [p.grad for p in parameters]) if found else None
    if module is None or any(type(g) is not Tensor or not g.is_contiguous() for g in found):
        return False
    most: float = module.largest(found)
    return most * math.sqrt(sum(g.numel() for g in found)) < torch.finfo(torch.float32).max ** 0.5


def _why_refused(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> str | None:
    for what, tensors in (("weights", parameters), ("gradients", gradients)):
        for x in tensors:
            own = None if x is None else local(x)
            if own is not None and (own.dtype not in DTYPES or type(own) is not Tensor):
                return f"it covers {what} of fp32, bf16 and fp16 in memory, got {type(own).__name__} of {own.dtype}"
            if own is not None and what == "weights" and not own.is_contiguous():
                return f"it covers contiguous weights, got strides {own.stride()} for shape {tuple(own.shape)}"
    return None


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
    new = store.room(weights[0].device if weights else torch.device("cpu"))
    moments: Any = tuple(new[name] for name in MOMENTS) if store.codecs is None else (
        _coded(module, store.codecs, store.tensors, store.done) if store.done else None,
        _coded(module, store.codecs, new, store.done + 1),
    )  # fmt: skip
    module.step(
        weights, dense, constants, moments, _settings(module, store.codecs), divisor=divisor, factor=factor,
        negated=negated, seed=seed,
    )  # fmt: skip
    torch.autograd.graph.increment_version([w for w, g in zip(weights, dense, strict=True) if g is not None])
    store.renew(new)


def _coded(module: ModuleType, codecs: MomentCodecs, tensors: dict[str, Tensor], step: int) -> Any:
    """The codes of m and v after ``step`` as the kernel takes them."""
    codec, log = codecs.of_m(step), codecs.of_v()
    payload, scales, codes, ranges = codecs.parts(tensors)
    rotation = codec.block, codec.rounds, codec.seed
    return module.Coded(payload, scales, codes, ranges, rotation, log.dither_seed(step))


def _settings(module: ModuleType, codecs: MomentCodecs | None) -> Any:
    if codecs is None:
        return None
    levels, thresholds = dispatch.codebook(codecs.bits["m"])
    return module.Settings(codecs.bits["m"], codecs.bits["v"], M_SCALE, levels, thresholds, RANGE)


assert BLOCK == 128

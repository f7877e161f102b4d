"""The arithmetic of AdamW: gradients as one vector, clipped; the update; the noise of a codec in the second moment."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tq.quant.bounds import unbiased_nmse
from tq.train.collectives import Codecs
from tq.train.shards import local, local_gradient

_V_FLOOR = 0.1  # what noise correction leaves of v at least


def check_dense(parameters: list[Tensor]) -> None:
    """ValueError if a gradient is sparse."""
    for p in parameters:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ValueError(f"gradients must be dense, got layout {p.grad.layout} for shape {tuple(p.shape)}")


def flat_gradients(parameters: list[Tensor]) -> Tensor:
    """Gradients (this rank's shards) as one new fp32 vector; zeros where there is none."""
    check_dense(parameters)
    found = ((p, local_gradient(p)) for p in parameters)
    return torch.cat([
        torch.zeros(local(p).numel(), dtype=torch.float32, device=p.device) if x is None else x.reshape(-1).float()
        for p, x in found
    ])  # fmt: skip


def clip_(gradients: list[Tensor], limit: float) -> bool:
    """Scales them in place to a global norm of at most ``limit``; False if they are not finite."""
    if not gradients:
        return True
    norm = torch.stack(torch._foreach_norm(gradients)).norm().item()
    if norm > limit and math.isfinite(norm):
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return math.isfinite(norm)


def what_is_not_finite(groups: list[dict[str, Any]]) -> str:
    """Why a step was given up whose gradients are not all finite, here or on another rank."""
    norms = []
    for g, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            gradient = local_gradient(p)
            if gradient is None:
                continue
            if not bool(gradient.isfinite().all()):
                bad = gradient[~gradient.isfinite()].flatten()[0].item()
                return (
                    f"the gradient of parameter {i} of group {g}, shape {tuple(p.shape)}, holds {bad}; "
                    "nothing was changed"
                )
            norms.append(float(gradient.norm(dtype=torch.float64)))
    length = math.hypot(*norms)
    if length > torch.finfo(torch.float32).max ** 0.5:
        return f"the gradient's norm, {length:.3g}, is beyond fp32; nothing was changed"
    return "another rank's gradient is not finite; nothing was changed"


def exact_root(v: Tensor) -> Tensor:
    """The root of fp32 numbers, rounded to the nearest; PyTorch's own is off by a last place on some processors."""
    return v.double().sqrt_().float()


def adamw_update(
    parameters: list[Tensor], directions: list[Tensor], roots: list[Tensor], group: dict[str, Any], step: int,
    dithers: list[Tensor] | None = None,
) -> None:  # fmt: skip
    """AdamW's update of parameters in their ``step``-th step; roots: of v, in place.

    dithers: for each parameter int32 in [0, 2**16), by which bf16 is rounded at random; None: to the nearest.
    """
    beta1, beta2 = group["betas"]
    torch._foreach_div_(roots, math.sqrt(1 - beta2**step))
    torch._foreach_add_(roots, group["eps"])
    size = group["lr"] / (1 - beta1**step)
    whole = (torch.float32, torch.float64)  # fp64 keeps its digits, though the moments are fp32
    weights = [p if p.dtype in whole else p.float() for p in parameters]
    torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_addcdiv_(weights, directions, roots, value=-size)
    for number, (p, weight) in enumerate(zip(parameters, weights, strict=True)):
        if p is not weight:
            p.copy_(weight)
        if dithers is not None and p.dtype == torch.bfloat16:
            bits = (weight.view(torch.int32) + dithers[number]) >> 16
            at_random = bits.to(torch.int16).view(torch.bfloat16)
            p.copy_(torch.where(weight.isfinite(), at_random, p))


def subtract_codec_noise(v: Tensor, codecs: Codecs) -> Tensor:
    """v less what the noise of both phases adds to squares, from the mean of v in each block; at least a tenth stays.

    An unbiased code of relative error d adds d times the mean square of its block. The first phase codes single
    ranks' gradients, whose noise is averaged; where those are mostly noise of the data, the sum over ranks is again d
    times the mean square of the mean gradient.
    """
    share = 1.0
    for codec in codecs:
        share *= 1 + unbiased_nmse(codec.bits)
    block = codecs[0].block
    padded = torch.nn.functional.pad(v, (0, -v.numel() % block)).view(-1, block)
    noise = padded.mean(1, keepdim=True) * (1 - 1 / share)
    return torch.maximum(padded - noise, _V_FLOOR * padded).view(-1)[: v.numel()]

"""Schemes of others, for comparison.

Sources: PowerSGD (Vogels et al. 2019); deep gradient compression (Lin et al. 2018); PyTorch's bf16_compress_hook.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tq.train.schemes.bucket import Bucket, Exchange, Exchanged, Scheme
from tq.train.schemes.ours import adam, send_exact


def send_bf16(b: Bucket) -> Exchange:
    """PyTorch's bf16_compress_hook: rounded before the sum."""
    nbytes = 2 * (b.ranks - 1) / b.ranks * 2 * b.gradient.numel()
    answer = yield b.ask(b.gradient.bfloat16().float(), nbytes=nbytes)
    return Exchanged(answer.mean.bfloat16().float(), {})


def send_low_rank(b: Bucket, rank: int) -> Exchange:
    """PowerSGD: P = M Q and Q = M^T P of every matrix, warm-started Q, feedback; vectors are sent exactly."""
    whole = b.gradient + b.kept("error")
    parts = [t.view(s) for t, s in zip(whole.split(b.sizes), b.shapes, strict=True)]
    low = [t.ndim >= 2 and min(t.flatten(1).shape) > rank for t in parts]
    matrices = [t.flatten(1) for t, is_low in zip(parts, low, strict=True) if is_low]
    if not matrices:
        return (yield from send_exact(b))
    rows, columns = ([m.shape[i] for m in matrices] for i in range(2))

    def unpacked(flat: Tensor, lengths: list[int]) -> list[Tensor]:
        return [t.view(-1, rank) for t in flat.split([n * rank for n in lengths])]

    q = b.stored("powersgd_q")
    if q is None:
        generator = torch.Generator().manual_seed(b.codecs[0].seed)
        q = torch.randn(sum(columns) * rank, generator=generator, dtype=torch.float32).to(whole.device)
    p = torch.cat([(m @ q_i).flatten() for m, q_i in zip(matrices, unpacked(q, columns), strict=True)])
    bases = [torch.linalg.qr(t)[0] for t in unpacked((yield b.ask(p)).mean, rows)]
    q = torch.cat([(m.T @ base).flatten() for m, base in zip(matrices, bases, strict=True)])
    vectors = torch.cat([q.new_zeros(0), *(t.flatten() for t, is_low in zip(parts, low, strict=True) if not is_low)])
    both = yield b.ask(torch.cat([q, vectors]))
    q, vectors = both.mean.split([q.numel(), vectors.numel()])
    sent = iter([base @ q_i.T for base, q_i in zip(bases, unpacked(q, columns), strict=True)])
    exact = iter(vectors.split([t.numel() for t, is_low in zip(parts, low, strict=True) if not is_low]))
    gradient = torch.cat([(next(sent) if is_low else next(exact)).flatten() for is_low in low])
    flags = torch.tensor(low, device=whole.device).repeat_interleave(torch.tensor(b.sizes, device=whole.device))
    return Exchanged(gradient, {"error": torch.where(flags, whole - gradient, 0.0), "powersgd_q": q.clone()})


def send_largest(b: Bucket, share: float) -> Exchange:
    """Deep gradient compression: the largest entries of momentum-corrected sums; what is sent is cleared."""
    momentum = b.kept("dgc_momentum").mul(b.betas[0]).add_(b.gradient)
    whole = b.kept("error") + momentum
    count = max(1, round(share * whole.numel()))
    chosen = whole.abs().topk(count).indices
    sent = torch.zeros_like(whole).index_copy_(0, chosen, whole[chosen])
    momentum[chosen] = 0.0
    whole[chosen] = 0.0
    answer = yield b.ask(sent, nbytes=(b.ranks - 1) * count * 8.0)  # fp32 and an int32 index, to everybody
    return Exchanged(answer.mean, {"error": whole, "dgc_momentum": momentum})


def rival(name: str, amount: float = 0.0) -> Scheme:
    """Schemes of others: "bf16"; "powersgd" with a rank; "top-k" with the share of entries sent."""
    known: dict[str, Callable[..., Any]] = {
        "bf16": send_bf16,
        "powersgd": partial(send_low_rank, rank=int(amount)),
        "top-k": partial(send_largest, share=amount),
    }
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}; got {name!r}")
    return Scheme(known[name], adam, per_rank=name != "bf16", name=f"{name} {amount:g}")

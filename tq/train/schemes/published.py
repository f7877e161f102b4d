"""Schemes as they were published: TurboQuant-Adam v3 and 1-bit Adam.

Sources: "published-v3" is TurboQuant-Adam v3 of the technical report AEGIS-TR-2026-004; 1-bit Adam (Tang et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.codebook import lloyd_max
from tq.quant.codec import Codec
from tq.quant.factors import rotation
from tq.quant.formats import nearest
from tq.train.comm.layout import seeded
from tq.train.schemes.bucket import Bucket, Exchange, Exchanged, Moments, Scheme

SIGMA_MEMORY = 0.9  # of the running scale of "published-v3"; the report does not print it


def by_running_scale(
    x: Tensor, sizes: Sequence[int], sigma: Tensor, codec: Codec, seed: int, memory: float = SIGMA_MEMORY
) -> tuple[Tensor, Tensor]:
    """(x decoded, sigma renewed): every tensor rotated in blocks, its levels times a moving average of its rms."""
    parts = x.split(list(sizes))
    now_T = torch.stack([part.norm() * part.numel() ** -0.5 for part in parts])
    renewed_T = torch.where(sigma > 0, memory * sigma + (1 - memory) * now_T, now_T)
    whole = torch.cat([F.pad(part, (0, -part.numel() % codec.block)) for part in parts])
    counts = [-(-part.numel() // codec.block) * codec.block for part in parts]
    scale_N1 = renewed_T.repeat_interleave(torch.tensor(counts, device=x.device) // codec.block)[:, None]
    turn_BB = rotation(codec.block, 1, seed, str(x.device))
    z_NB = whole.view(-1, codec.block) @ turn_BB / scale_N1.clamp_min(torch.finfo(torch.float32).tiny)
    levels_L = torch.tensor(lloyd_max(codec.bits)[0], dtype=torch.float32, device=x.device)
    decoded = ((nearest(z_NB, levels_L) * scale_N1) @ turn_BB.T).flatten().split(counts)
    return torch.cat([y[: part.numel()] for y, part in zip(decoded, parts, strict=True)]), renewed_T


def _send_to_all(b: Bucket, x: Tensor, feedback: bool, memory: float | None = SIGMA_MEMORY) -> Exchange:
    """The report's all-gather: everybody's codes to everybody. memory: of the scale of a tensor; None: one a block."""
    whole = x + b.kept("error") if feedback else x
    codec, new = seeded(b.codecs[0], b.key, b.rank), {}
    if memory is None:
        sent, scales = codec.decode(codec.encode(whole)), 0
        bits = codec.bits_per_element
    else:
        sigma = b.kept("sigma", len(b.sizes))
        sent, new["sigma"] = by_running_scale(whole, b.sizes, sigma, codec, codec.seed, memory)
        bits, scales = codec.bits, len(b.sizes)
    if feedback:
        new["error"] = whole - sent
    nbytes = (b.ranks - 1) * (sent.numel() * bits / 8 + 4 * scales)
    return Exchanged((yield b.ask(sent, nbytes=nbytes)).mean, new)


def send_scaled_gradient(b: Bucket, feedback: bool) -> Exchange:
    """The gradient as the report quantizes: its setting for the failures of gradient quantization."""
    return (yield from _send_to_all(b, b.gradient, feedback))


def send_published(
    b: Bucket, feedback: bool = True, memory: float | None = SIGMA_MEMORY, mean_v: bool = False
) -> Exchange:
    """v3: m and v of this rank's gradients; m plus residual goes to all. mean_v: v is averaged in every step."""
    new = {"m": b.momentum(), "v": b.second_moment(b.gradient)}
    if mean_v:
        new["v"] = (yield b.ask(new["v"])).mean
    momentum, renewed = yield from _send_to_all(b, new["m"], feedback, memory)
    return Exchanged(momentum, new | renewed)


def own_v(b: Bucket, found: Exchanged) -> Moments:
    """v3's update: the mean of what was sent over this rank's own v. The replicas drift apart."""
    return Moments(found.gradient, found.renewed["v"], {})


def published(scale: str = "tensor", v: str = "own", feedback: bool = True, memory: float = SIGMA_MEMORY) -> Scheme:
    """v3 taken apart. scale: one a "tensor", a moving average that keeps ``memory`` of itself, or one a "block", as
    the codec's; v: each rank's "own", or the "mean" of all, sent exactly; feedback: of what was not sent.

    ``published()`` is "published-v3".
    """
    if scale not in ("tensor", "block") or v not in ("own", "mean") or not 0 <= memory < 1:
        raise ValueError(
            f"scale must be 'tensor' or 'block', v 'own' or 'mean' and memory in [0, 1), got {scale!r}, {v!r}, "
            f"{memory!r}"
        )
    exchange = partial(
        send_published, feedback=feedback, memory=memory if scale == "tensor" else None, mean_v=v == "mean"
    )
    name = f"published {scale} {v} {feedback} {memory:g}"
    return Scheme(exchange, own_v, "momentum", "mse", per_rank=True, agrees=v == "mean", name=name)


def _signs(x: Tensor, sizes: Sequence[int]) -> Tensor:
    parts = [(t, t.abs().mean()) for t in x.split(list(sizes))]
    return torch.cat([torch.where(t >= 0, magnitude, -magnitude) for t, magnitude in parts])


def send_signs(b: Bucket) -> Exchange:
    """1-bit Adam after its warm-up: signs of the momentum, one magnitude a tensor, feedback in both phases."""
    whole = b.momentum() + b.kept("error")
    sent = _signs(whole, b.sizes)
    new = {"error": whole - sent}
    nbytes = 2 * (b.ranks - 1) / b.ranks * (sent.numel() / 8 + 4 * len(b.sizes))
    whole = (yield b.ask(sent, nbytes=nbytes)).mean + b.kept("server_error")  # whole on every rank; really its chunk
    sent = _signs(whole, b.sizes)
    return Exchanged(sent, {**new, "server_error": whole - sent})

"""Schemes of others, for comparison.

Sources: PowerSGD (Vogels et al. 2019); deep gradient compression (Lin et al. 2018); PyTorch's bf16_compress_hook;
blocks of integers in both phases, ZeRO++'s qgZ (Wang et al. 2023); QSGD (Alistarh et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tq.quant import formats
from tq.quant.factors import Factors, qsgd
from tq.quant.rotation import derive_seed
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


RoundTrip = Callable[[Tensor, int], Tensor]  # of a vector, with a seed


def send_rounded(b: Bucket, through: Callable[[Bucket], tuple[RoundTrip, float]]) -> Exchange:
    """Each rank's gradient, and then the mean, through a format that is worked out here and not packed.

    through: from the bucket, the round trip and the bits that an element takes; the bytes are counted from those.
    """
    trip, bits = through(b)
    seeds = [derive_seed(b.codecs[0].seed, phase, *b.key) for phase in ("gradient", "mean")]
    nbytes = 2 * (b.ranks - 1) / b.ranks * bits / 8 * b.gradient.numel()
    answer = yield b.ask(trip(b.gradient, derive_seed(seeds[0], b.rank)), nbytes=nbytes)
    return Exchanged(trip(answer.mean, seeds[1]), {})


def _format(b: Bucket, format_: formats.Format) -> tuple[RoundTrip, float]:
    return lambda x, seed: format_.roundtrip(x), format_.bits_per_element


def _like_codec(b: Bucket, trip: Callable[[Tensor, int, int, int], Tensor]) -> tuple[RoundTrip, float]:
    """With the bits, the blocks and the scales of the first phase's codec."""
    codec = b.codecs[0]
    return lambda x, seed: trip(x, codec.bits, codec.block, seed), codec.bits_per_element


_BLOCK = 128  # with one fp32 scale, as the codec has it where nothing else is said
FORMATS = {
    "int8": formats.integer(8, _BLOCK), "int4": formats.integer(4, _BLOCK), "nf4": formats.nf4(_BLOCK),
    "nf4-double": formats.nf4_double_quantized(), "fp8-e4m3": formats.fp8("e4m3", _BLOCK),
    "fp8-e5m2": formats.fp8("e5m2", _BLOCK), "mxfp4": formats.mxfp4(), "nvfp4": formats.nvfp4(),
}  # fmt: skip
SIGN = Factors(0, scale="mse")  # with one bit: the mean magnitude of a block and the signs


def rival(name: str, amount: float = 0.0, factors: Factors | None = None) -> Scheme:
    """Schemes of others: "bf16"; "powersgd" with a rank; "top-k" with the share of entries sent; those of ``FORMATS``.

    "qsgd" and "factors", the codec taken apart, with the bits and blocks of the codec; "sign" is ``SIGN`` with 1 bit.
    """
    known: dict[str, Callable[..., Any]] = {
        "bf16": send_bf16,
        "powersgd": partial(send_low_rank, rank=int(amount)),
        "top-k": partial(send_largest, share=amount),
        "qsgd": partial(send_rounded, through=partial(_like_codec, trip=qsgd)),
        "sign": partial(send_rounded, through=partial(_like_codec, trip=SIGN.roundtrip)),
    }
    known |= {key: partial(send_rounded, through=partial(_format, format_=f)) for key, f in FORMATS.items()}
    if factors is not None:
        known["factors"] = partial(send_rounded, through=partial(_like_codec, trip=factors.roundtrip))
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}; got {name!r}")
    keeps = name in ("powersgd", "top-k")
    return Scheme(known[name], adam, per_rank=keeps, name=f"{name} {amount:g}" + (f" {factors}" if factors else ""))

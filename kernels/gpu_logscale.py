"""Triton kernels of the logarithmic codec of second moments: one pass over the numbers, the bits of the PyTorch one.

A program works on G whole blocks, a tile [G, B]; the dither is computed where it is used. Blocks of a power of two from
128 on. Nothing here waits for the device.

Shapes: N blocks, B block size, W = B * bits / 8 bytes a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gpu import _check, _signed_seed

_TILE, _WARPS = 2048, 4  # numbers of a program: 16 a thread
_OCTAVE = 1 << 23
_INFINITY, _NAN, _DITHER = tl.constexpr(0x7F800000), tl.constexpr(0x7FC0), tl.constexpr(3)


@triton.jit
def _dither(seed, first_run, USE: tl.constexpr, RUNS: tl.constexpr):
    """int32 in [0, 2**16) [RUNS * 128]: see ``tq.quant.rotation.dither``."""
    lanes = tl.arange(0, RUNS * 16)
    at = first_run * 16 + lanes  # int64
    zero = tl.zeros([RUNS * 16], tl.int32)
    a, b, c, d = tl.philox(seed, at.to(tl.int32), (at >> 32).to(tl.int32), zero, zero + USE)
    a, b, c, d = a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), d.to(tl.uint32)
    first = tl.join(tl.join(a & 0xFFFF, a >> 16), tl.join(b & 0xFFFF, b >> 16))  # [lane, half, word % 2]
    second = tl.join(tl.join(c & 0xFFFF, c >> 16), tl.join(d & 0xFFFF, d >> 16))
    words = tl.reshape(tl.join(first, second), [RUNS, 16, 2, 2, 2])
    return tl.reshape(tl.permute(words, (0, 4, 3, 2, 1)), [RUNS * 128]).to(tl.int32)


@triton.jit
def _chances(dither):
    """Uniform in (0, 1): halfway between two of 2**16 steps."""
    return (dither.to(tl.float32) + 0.5) * (1.0 / 65536)


@triton.jit
def _grid(low16, high16, BITS: tl.constexpr):
    """Bits of the lowest level, and the distance between levels in fp32."""
    low = low16.to(tl.int32) << 16
    spread = ((high16.to(tl.int32) << 16) - low).to(tl.float32)
    return low, tl.maximum(tl.div_rn(spread, tl.full(spread.shape, 2**BITS - 2, tl.float32)), 1.0)


@triton.jit
def _level(low, width, index):
    return (low + (index * width).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _range(low, high, reach):
    """What is kept of a block's range: upper halves of the bits of its least number but 0, and of its greatest."""
    bad = (high >= _INFINITY) | (low < 0)
    low = tl.minimum(tl.maximum(low.to(tl.int64), high.to(tl.int64) - reach), high.to(tl.int64)).to(tl.int32)
    high = ((high.to(tl.int64) + 0xFFFF) >> 16).to(tl.int32)
    return tl.where(bad, _NAN, low >> 16), tl.where(bad, _NAN, high)


@triton.jit
def _index(v, chance, low, width, inverse, BITS: tl.constexpr):
    """Codes of numbers, rounded up where ``chance`` says so."""
    place = v.to(tl.int32, bitcast=True)
    below = tl.floor((place - low).to(tl.float32) * inverse)
    below = tl.minimum(tl.maximum(below, 0.0), 2.0**BITS - 2)
    lower = _level(low, width, below)
    gap = _level(low, width, below + 1.0) - lower
    up = tl.where(chance * gap < v - lower, 1.0, 0.0)
    return tl.where(place == 0, 0, (below + 1.0 + up).to(tl.int32))


@triton.jit
def _number(index, low, width, high16):
    """Numbers of codes."""
    level = tl.where(index == 0, 0.0, _level(low, width, tl.maximum(index.to(tl.float32) - 1.0, 0.0)))
    return tl.where(high16 == _NAN, float("nan"), level)


@triton.jit(do_not_specialize=["seed", "reach"])
def _encode_kernel(
    p_v, p_codes, p_ranges, n, N, seed, reach, BITS: tl.constexpr, B: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * G
    o_G = first + tl.arange(0, G)
    o_GB = o_G[:, None] * B + tl.arange(0, B)[None, :]
    v = tl.load(p_v + o_GB, mask=o_GB < n, other=0.0)
    place = v.to(tl.int32, bitcast=True)
    low16, high16 = _range(tl.min(tl.where(place == 0, _INFINITY, place), 1), tl.max(place, 1), reach)
    tl.store(p_ranges + 2 * o_G, low16.to(tl.int16), mask=o_G < N)
    tl.store(p_ranges + 2 * o_G + 1, high16.to(tl.int16), mask=o_G < N)
    low, width = _grid(low16, high16, BITS)
    inverse = tl.div_rn(tl.full(width.shape, 1.0, tl.float32), width)
    chance = _chances(tl.reshape(_dither(seed, first * (B // 128), _DITHER, G * (B // 128)), [G, B]))
    code = _index(v, chance, low[:, None], width[:, None], inverse[:, None], BITS)
    PARTS: tl.constexpr = 8 // BITS
    packed = tl.sum(tl.reshape(code, [G, B // PARTS, PARTS]) << (tl.arange(0, PARTS) * BITS)[None, None, :], 2)
    o_W = o_G[:, None] * (B // PARTS) + tl.arange(0, B // PARTS)[None, :]
    tl.store(p_codes + o_W, packed.to(tl.uint8), mask=(o_G < N)[:, None])


@triton.jit
def _decode_kernel(p_codes, p_ranges, p_out, n, N, BITS: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    o_G = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    PARTS: tl.constexpr = 8 // BITS
    o_W = o_G[:, None] * (B // PARTS) + tl.arange(0, B // PARTS)[None, :]
    packed = tl.load(p_codes + o_W, mask=(o_G < N)[:, None], other=0).to(tl.int32)
    shifts = (tl.arange(0, PARTS) * BITS)[None, None, :]
    index = tl.reshape((packed[:, :, None] >> shifts) & (2**BITS - 1), [G, B])
    low16 = tl.load(p_ranges + 2 * o_G, mask=o_G < N, other=0)
    high16 = tl.load(p_ranges + 2 * o_G + 1, mask=o_G < N, other=0)
    low, width = _grid(low16, high16, BITS)
    level = _number(index, low[:, None], width[:, None], high16[:, None])
    o_GB = o_G[:, None] * B + tl.arange(0, B)[None, :]
    tl.store(p_out + o_GB, level, mask=o_GB < n)


def why_not(block: int) -> str | None:
    """Why blocks of this length are not covered; None if they are."""
    return None if block >= 128 and block & (block - 1) == 0 and block <= _TILE else (
        f"it covers blocks of a power of two from 128 to {_TILE}, got {block}"
    )  # fmt: skip


def encode(v: Tensor, codes_NW: Tensor, ranges_N2: Tensor, seed: int, *, block: int, bits: int, octaves: int) -> None:
    """Encode contiguous fp32 ``v`` into uint8 and int16; ``seed``: of the dither."""
    _check(v, codes_NW)
    assert v.dtype == torch.float32 and v.is_contiguous() and codes_NW.is_contiguous() and ranges_N2.is_contiguous()
    groups, blocks = _TILE // block, codes_NW.shape[0]
    with torch.cuda.device_of(v):
        _encode_kernel[(-(-blocks // groups),)](
            v, codes_NW, ranges_N2, v.numel(), blocks, _signed_seed(seed), octaves * _OCTAVE, BITS=bits, B=block,
            G=groups, num_warps=_WARPS,
        )  # fmt: skip


def decode(codes_NW: Tensor, ranges_N2: Tensor, out: Tensor, *, block: int, bits: int) -> None:
    """Decode into contiguous fp32 ``out``."""
    _check(out, codes_NW)
    assert out.dtype == torch.float32 and out.is_contiguous()
    assert codes_NW.is_contiguous() and ranges_N2.is_contiguous()
    groups, blocks = _TILE // block, codes_NW.shape[0]
    with torch.cuda.device_of(out):
        _decode_kernel[(-(-blocks // groups),)](
            codes_NW, ranges_N2, out, out.numel(), blocks, BITS=bits, B=block, G=groups, num_warps=_WARPS
        )

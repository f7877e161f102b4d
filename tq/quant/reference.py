"""Reference encoders and decoders of blocks in plain PyTorch: clear, vectorised, CPU and CUDA.

The kernels are held to this file, and share its signatures. fp32 arithmetic whatever the input type. No speed beyond
bounded temporaries: blocks of ``encode`` and ``decode`` are worked off in chunks. ``log_encode`` and ``log_decode``
belong to the logarithmic codec of second moments.

Shapes: N blocks, B block size, W packed bytes a block, R rounds, L = 2**bits levels, K multipliers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.bits import pack, unpack
from tq.quant.rotation import dither, rotate, unrotate
from tq.quant.scale_search import ONE, STEPS, TOP, Search

_CHUNK_ELEMENTS = 1 << 19  # fp32 temporaries of 2 MB stay in a core's cache
_OCTAVE, _INFINITY, _NAN = 1 << 23, 0x7F800000, 0x7FC0  # bits of fp32; upper half of a NaN's


def _chunks(rows: int, dim: int, block: int) -> Iterator[tuple[slice, slice, slice]]:
    """(rows, columns, blocks) of bounded pieces of [rows, dim] in which every row starts a new block."""
    per_row = -(-dim // block)
    step = max(1, _CHUNK_ELEMENTS // block)
    if per_row <= step:
        many = step // max(1, per_row)
        for first in range(0, rows if dim else 0, many):
            last = min(first + many, rows)
            yield slice(first, last), slice(0, dim), slice(first * per_row, last * per_row)
        return
    for row in range(rows):
        for first in range(0, per_row, step):
            last = min(first + step, per_row)
            columns = slice(first * block, min(last * block, dim))
            yield slice(row, row + 1), columns, slice(row * per_row + first, row * per_row + last)


def _block_scale(scale: str, z_NB: Tensor, dot_N: Tensor, square_N: Tensor) -> Tensor:
    """Stored scale s of blocks z whose levels q have dot = <z, q> and square = |q|^2; decoding is s q."""
    norm_N = z_NB.norm(dim=1)
    if scale == "paper":  # rms of the block: the quantizer of the paper
        return norm_N * z_NB.shape[1] ** -0.5
    if scale == "mse":  # least squares: argmin_s |z - s q|
        return dot_N / square_N
    if scale == "unbiased":  # makes <z, s q> = |z|^2 (EDEN, Vargaftik et al. 2022)
        return norm_N * norm_N / dot_N
    return norm_N * square_N.rsqrt()  # "norm": |s q| = |z|


def _squared_sine(u_NB: Tensor, q_NB: Tensor) -> Tensor:
    """Squared sine [N] of the angle between u and q, from r = u - q.

    Gram's determinant |u|^2 |q|^2 - <u, q>^2 is the same with r in place of q. At 8 bits cosines differ from 1 and
    from each other by less than their rounding in fp32; with the small r nothing cancels.
    """
    r_NB = u_NB - q_NB
    energy_N, loss_N, product_N = (u_NB * u_NB).sum(1), (r_NB * r_NB).sum(1), (u_NB * r_NB).sum(1)
    return (energy_N * loss_N - product_N * product_N) / (energy_N * (energy_N - 2 * product_N + loss_N))


def _best_multipliers(u_NB: Tensor, search: Search, levels_L: Tensor, thresholds: Tensor) -> Tensor:
    """[N]: of the multipliers, the one whose codes have the largest cosine with the block; the first wins ties."""
    best_N = u_NB.new_full(u_NB.shape[:1], search.multipliers[0])
    steps_NB = torch.round(u_NB.nan_to_num().abs() * STEPS).clamp(max=TOP)
    least_N = torch.full_like(best_N, torch.inf)
    for k, multiplier in enumerate(search.multipliers):
        if search.levels:
            q_NB = u_NB.new_tensor(search.levels)[torch.bucketize(steps_NB, u_NB.new_tensor(search.cuts[k]))]
            dot_N, square_N = (steps_NB * q_NB).sum(1), (q_NB * q_NB).sum(1)  # integers below 2**24: exact
            loss_N = -(dot_N * dot_N / square_N)
        else:
            trial_NB = u_NB * multiplier
            loss_N = _squared_sine(trial_NB, levels_L[torch.bucketize(trial_NB, thresholds)])
        better_N = loss_N < least_N
        best_N, least_N = torch.where(better_N, multiplier, best_N), torch.where(better_N, loss_N, least_N)
    return best_N


def encode(
    x_RD: Tensor,
    payload_NW: Tensor,
    scale_N: Tensor,
    *,
    bits: int,
    block: int,
    scale: str,
    rounds: int,
    rotation: str,
    seed: int,
    levels_L: Tensor,
    thresholds: Tensor,
    search: Search = ONE,
    factor: float = 1.0,
) -> None:
    """Encode ``factor * x_RD`` [rows, dim] (fp32, bf16 or fp16) into ``payload_NW`` (uint8) and ``scale_N``.

    Every row starts a new block and its last block is zero-padded: N = rows * ceil(dim / B). The factor is a finite
    positive number and goes into the scales: the codes are those of ``x_RD``.

    Blocks with NaN or Inf, or whose scale does not fit ``scale_N.dtype``, get the scale NaN; those and zero blocks
    (scale 0) get payload 0. Never synchronises with a device.
    """
    for rows, columns, blocks in _chunks(x_RD.shape[0], x_RD.shape[1], block):
        x_RC = x_RD[rows, columns].float()
        x_NB = F.pad(x_RC, (0, -x_RC.shape[1] % block)).view(-1, block)

        # A power of two per block brings the largest magnitude into [1/2, 1): 1e38 squared and 1e-38 squared then fit
        # fp32. In two steps, as 2**149 is no fp32 number.
        _, exponent_N = torch.frexp(x_NB.abs().amax(dim=1))
        half_N = exponent_N // 2
        x_NB = torch.ldexp(torch.ldexp(x_NB, -half_N[:, None]), (half_N - exponent_N)[:, None])

        z_NB = rotate(x_NB, rounds, seed, rotation)
        rms_N = z_NB.norm(dim=1) * block**-0.5
        u_NB = z_NB / torch.where(rms_N > 0, rms_N, 1.0)[:, None]

        if len(search.multipliers) > 1:
            u_NB = u_NB * _best_multipliers(u_NB, search, levels_L, thresholds)[:, None]
        index_NB = torch.bucketize(u_NB, thresholds, out_int32=True)  # thresholds strictly below
        q_NB = levels_L[index_NB]
        dot_N, square_N = (z_NB * q_NB).sum(1), (q_NB * q_NB).sum(1)

        s_N = _block_scale(scale, z_NB, dot_N, square_N)
        s_N = (torch.ldexp(s_N.double(), exponent_N.double()) * factor).to(scale_N.dtype)
        s_N = torch.where(rms_N == 0, 0.0, torch.where(s_N.isfinite(), s_N, torch.nan)).to(scale_N.dtype)
        scale_N[blocks] = s_N
        coded_N = s_N.isfinite() & (rms_N > 0)
        payload_NW[blocks] = pack(torch.where(coded_N[:, None], index_NB, 0), bits)


def decode(
    payload_NW: Tensor,
    scale_N: Tensor,
    out_RD: Tensor,
    *,
    bits: int,
    block: int,
    rounds: int,
    rotation: str,
    seed: int,
    levels_L: Tensor,
    accumulate: bool = False,
) -> None:
    """Decode into ``out_RD`` [rows, dim] of any float dtype (padding dropped), or add to it in fp32.

    A finite value beyond the range of ``out_RD.dtype`` becomes its largest: the true value is known to lie inside, so
    this only lessens the error. A NaN scale gives NaN.
    """
    largest = torch.finfo(out_RD.dtype).max
    for rows, columns, blocks in _chunks(out_RD.shape[0], out_RD.shape[1], block):
        q_NB = levels_L[unpack(payload_NW[blocks], bits, block).int()]
        # scale last: the rotated levels are of order 1, so only this product can leave the range of fp32
        y_NB = unrotate(q_NB, rounds, seed, rotation) * scale_N[blocks].float()[:, None]
        target_RC = out_RD[rows, columns]
        y_RC = y_NB.clamp_(-largest, largest).view(target_RC.shape[0], -1)[:, : target_RC.shape[1]]
        if accumulate:
            target_RC += y_RC
        else:
            target_RC.copy_(y_RC)


# --- the logarithmic codec of second moments ------------------------------------------------------------------


def _log_grid(ranges: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(bits of the lowest level, distance between levels in fp32) [N, 1] each."""
    low, high = (ranges.int() << 16).split(1, 1)
    return low, ((high - low).float() / ((1 << bits) - 2)).clamp_min_(1.0)


def _log_level(low: Tensor, width: Tensor, index: Tensor) -> Tensor:
    return (low + (index * width).int()).view(torch.float32)


def log_encode(
    v: Tensor, codes_NW: Tensor, ranges_N2: Tensor, seed: int, *, block: int, bits: int, octaves: int
) -> None:
    """Encode fp32 ``v`` (padded with zeros) into ``codes_NW`` uint8 and ``ranges_N2`` int16.

    seed: of the dither. octaves: of a block that are told apart.
    """
    v_NB = F.pad(v.reshape(-1), (0, -v.numel() % block)).view(-1, block)
    place_NB = v_NB.view(torch.int32)
    high = place_NB.amax(1, keepdim=True)
    low = torch.where(place_NB == 0, _INFINITY, place_NB).amin(1, keepdim=True)
    bad = ((high >= _INFINITY) | (low < 0)).squeeze(1)
    low = torch.minimum(torch.maximum(low, high - octaves * _OCTAVE), high)
    ranges_N2.copy_(torch.cat([low >> 16, (high + 0xFFFF) >> 16], 1))
    ranges_N2[bad] = _NAN
    low, width = _log_grid(ranges_N2, bits)
    below = ((place_NB - low).float() * (1.0 / width)).floor_().clamp_(0, (1 << bits) - 2)
    lower = _log_level(low, width, below)
    gap = _log_level(low, width, below + 1).sub_(lower)
    words = dither(seed, v_NB.numel(), v.device).view(v_NB.shape)
    chance = words.float().add_(0.5).mul_(1 / 65536)  # uniform in (0, 1), 16 bits of randomness
    codes = below.add_(1).add_(chance * gap < v_NB - lower).mul_(place_NB != 0).to(torch.uint8)
    parts = 8 // bits
    codes_NW.copy_(codes[:, ::parts])
    for part in range(1, parts):
        codes_NW |= codes[:, part::parts] << (part * bits)


def log_decode(codes_NW: Tensor, ranges_N2: Tensor, out: Tensor, *, block: int, bits: int) -> None:
    """Decode into fp32 ``out``; the inverse of ``log_encode`` up to its rounding."""
    index = codes_NW
    if bits < 8:
        parts = [codes_NW >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        index = torch.stack(parts, 2).flatten(1)
    low, width = _log_grid(ranges_N2, bits)
    levels = _log_level(low, width, (index.float() - 1.0).clamp_min_(0.0)).masked_fill_(index == 0, 0.0)
    levels[ranges_N2[:, 1] == _NAN] = torch.nan
    out.view(-1).copy_(levels.view(-1)[: out.numel()])

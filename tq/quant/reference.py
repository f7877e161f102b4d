"""Reference encoder and decoder of blocks in plain PyTorch: clear, vectorised, CPU and CUDA.

The kernels are held to this file, and share its signatures. fp32 arithmetic whatever the input type. No speed beyond
bounded temporaries: blocks are worked off in chunks.

Shapes: N blocks, B block size, W packed bytes a block, R rounds, L = 2**bits levels, K multipliers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.bits import pack, unpack
from tq.quant.rotation import rotate, unrotate

_CHUNK_ELEMENTS = 1 << 19  # fp32 temporaries of 2 MB stay in a core's cache


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
    multipliers: tuple[float, ...],
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

        for k, multiplier in enumerate(multipliers):
            trial_NB = torch.bucketize(u_NB * multiplier, thresholds, out_int32=True)  # thresholds strictly below
            sine_N = _squared_sine(u_NB * multiplier, levels_L[trial_NB]) if len(multipliers) > 1 else rms_N
            if k == 0:
                index_NB, least_N = trial_NB, sine_N
                continue
            better_N = sine_N < least_N  # first wins ties
            index_NB = torch.where(better_N[:, None], trial_NB, index_NB)
            least_N = torch.where(better_N, sine_N, least_N)
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

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


def _chunks(n_blocks: int, block: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_ELEMENTS // block)
    for first in range(0, n_blocks, step):
        yield first, min(first + step, n_blocks)


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


def encode(
    x: Tensor,
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
) -> None:
    """Encode flat ``x`` [n] (fp32, bf16 or fp16; zero-padded to N*B) into ``payload_NW`` (uint8) and ``scale_N``.

    Blocks with NaN or Inf, or whose scale does not fit ``scale_N.dtype``, get the scale NaN; those and zero blocks
    (scale 0) get payload 0. Never synchronises with a device.
    """
    for first, last in _chunks(scale_N.shape[0], block):
        flat = x[first * block : last * block].float()
        x_NB = F.pad(flat, (0, (last - first) * block - flat.numel())).view(-1, block)

        # A power of two per block brings the largest magnitude into [1/2, 1): 1e38 squared and 1e-38 squared then fit
        # fp32. In two steps, as 2**149 is no fp32 number.
        _, exponent_N = torch.frexp(x_NB.abs().amax(dim=1))
        half_N = exponent_N // 2
        x_NB = torch.ldexp(torch.ldexp(x_NB, -half_N[:, None]), (half_N - exponent_N)[:, None])

        z_NB = rotate(x_NB, rounds, seed, rotation)
        rms_N = z_NB.norm(dim=1) * block**-0.5
        u_NB = z_NB / torch.where(rms_N > 0, rms_N, 1.0)[:, None]

        index_NB = torch.bucketize(u_NB * multipliers[0], thresholds, out_int32=True)  # thresholds strictly below
        q_NB = levels_L[index_NB]
        dot_N, square_N = (z_NB * q_NB).sum(1), (q_NB * q_NB).sum(1)
        for multiplier in multipliers[1:]:
            trial_NB = torch.bucketize(u_NB * multiplier, thresholds, out_int32=True)
            q_NB = levels_L[trial_NB]
            trial_dot_N, trial_square_N = (z_NB * q_NB).sum(1), (q_NB * q_NB).sum(1)
            better_N = trial_dot_N * trial_square_N.rsqrt() > dot_N * square_N.rsqrt()  # larger cosine; first wins ties
            index_NB = torch.where(better_N[:, None], trial_NB, index_NB)
            dot_N = torch.where(better_N, trial_dot_N, dot_N)
            square_N = torch.where(better_N, trial_square_N, square_N)

        s_N = _block_scale(scale, z_NB, dot_N, square_N)
        s_N = torch.ldexp(torch.ldexp(s_N, half_N), exponent_N - half_N).to(scale_N.dtype)
        s_N = torch.where(rms_N == 0, 0.0, torch.where(s_N.isfinite(), s_N, torch.nan)).to(scale_N.dtype)
        scale_N[first:last] = s_N
        coded_N = s_N.isfinite() & (rms_N > 0)
        payload_NW[first:last] = pack(torch.where(coded_N[:, None], index_NB, 0), bits)


def decode(
    payload_NW: Tensor,
    scale_N: Tensor,
    out: Tensor,
    *,
    bits: int,
    block: int,
    rounds: int,
    rotation: str,
    seed: int,
    levels_L: Tensor,
) -> None:
    """Decode into flat ``out`` [n] of any float dtype (padding dropped).

    A finite value beyond the range of ``out.dtype`` becomes its largest: the true value is known to lie inside, so
    this only lessens the error. A NaN scale gives NaN.
    """
    largest = torch.finfo(out.dtype).max
    for first, last in _chunks(scale_N.shape[0], block):
        q_NB = levels_L[unpack(payload_NW[first:last], bits, block).int()]
        # scale last: the rotated levels are of order 1, so only this product can leave the range of fp32
        y_NB = unrotate(q_NB, rounds, seed, rotation) * scale_N[first:last].float()[:, None]
        target = out[first * block : last * block]
        target.copy_(y_NB.clamp_(-largest, largest).view(-1)[: target.numel()])

"""How Gaussian are the numbers of a block? Kolmogorov-Smirnov distance, kurtosis, crest factor, effective count.

The codec divides each block by its own rms, so that is done here first: what counts is the shape inside blocks, not the
magnitudes between them. Zero blocks carry no shape and are left out. No p-values: with a million samples every real
tensor differs from a Gaussian, and the distance says by how much.

Shapes: N blocks, B block size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.rotation import rotate


@dataclass(frozen=True)
class Shape:
    """ks: max |F - Phi|. excess_kurtosis: 0 for a Gaussian, large with outliers, -2 for two values.

    crest: mean over blocks of max |u| (about 2.7 for 128 Gaussians). effective: mean over blocks of
    (sum x^2)^2 / sum x^4 over B, the share of the block that carries its energy (1/3 for a Gaussian, 1/B for a spike).
    zeros: share of elements that are exactly zero, zero blocks included.
    """

    ks: float
    excess_kurtosis: float
    crest: float
    effective: float
    zeros: float


def unit_blocks(x: Tensor, block: int = 128) -> Tensor:
    """Blocks of ``x`` divided by their rms, fp32 [N, B]; zero blocks and an incomplete tail are left out.

    A tensor shorter than a block is taken as one block of its own length.
    """
    flat = x.detach().float().reshape(-1)
    if flat.numel() < block:
        x_NB = flat[None]
    else:
        x_NB = flat[: flat.numel() // block * block].view(-1, block)
    # divided by the largest magnitude first: squares of tiny second moments would vanish in fp32
    largest_N1 = x_NB.abs().amax(dim=1, keepdim=True)
    x_NB = x_NB[largest_N1[:, 0] > 0] / largest_N1[largest_N1 > 0][:, None]
    return F.normalize(x_NB, dim=1) * x_NB.shape[1] ** 0.5


def ks_distance(u: Tensor) -> float:
    """Largest gap between the empirical distribution of ``u`` (any shape) and N(0, 1)."""
    ordered = u.detach().double().reshape(-1).sort().values
    n = ordered.numel()
    if n == 0:
        raise ValueError("ks_distance needs at least one value, got an empty tensor")
    cdf = torch.special.ndtr(ordered)
    rank = torch.arange(n + 1, dtype=torch.float64, device=u.device) / n
    # at ties only the first lower and the last upper gap count; the others are smaller, so the maximum is right
    return float(torch.maximum((rank[1:] - cdf).max(), (cdf - rank[:-1]).max()))


def shape_of(x: Tensor, block: int = 128, rounds: int = 0, seed: int = 0) -> Shape:
    """Shape of the blocks of ``x`` after ``rounds`` Hadamard rounds (0: as they are). Raises if all of it is zero."""
    u_NB = unit_blocks(x, block)
    if u_NB.numel() == 0:
        raise ValueError("an all-zero tensor has no shape")
    if rounds:
        u_NB = rotate(u_NB, rounds, seed)
    square_NB = u_NB.double().square()
    return Shape(
        ks=ks_distance(u_NB),
        excess_kurtosis=float(square_NB.square().mean() - 3.0),
        crest=float(u_NB.abs().amax(dim=1).mean()),
        effective=float((1.0 / square_NB.square().mean(dim=1)).mean()),
        zeros=float((x == 0).double().mean()),
    )


def rademacher_excess_kurtosis(x: Tensor) -> float:
    """Excess kurtosis of sum(+-x_i) over random signs: -2 sum x^4 / (sum x^2)^2.

    So one Hadamard round makes a coordinate of the block Gaussian only so far as many elements share the energy.
    """
    square = x.double().reshape(-1).square()
    return float(-2.0 * square.square().sum() / square.sum() ** 2)


def gaussian_crest(block: int) -> float:
    """Expected max |u| over ``block`` independent N(0, 1), by integrating the survival function."""
    t = torch.linspace(0.0, 10.0, 20001, dtype=torch.float64)
    below = torch.special.erf(t / math.sqrt(2.0)) ** block
    return float(torch.trapezoid(1.0 - below, t))

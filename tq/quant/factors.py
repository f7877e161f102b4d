"""The codec taken apart: rotation, levels, scale and rounding, each of which can be left out or replaced.

For questions of the kind "what does the rotation buy?". Each setting is x -> decoded x in fp32; nothing is packed and
nothing is fast. With one to three rounds, Lloyd-Max levels and rounding to the nearest it is ``tq.Codec``.

Sources: stochastic rounding and QSGD, Alistarh et al. 2017; optimal uniform steps, Max 1960; unbiased scales, EDEN
(Vargaftik et al. 2022).

Shapes: N blocks, B block size, L = 2**bits levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.codebook import _gaussian_integrals, lloyd_max
from tq.quant.rotation import dither, rotate, unrotate
from tq.quant.settings import int_in, one_of

CHOICES = {
    "rounds": (0, 1, 2, 3),
    "levels": ("lloyd-max", "uniform"),
    "scale": ("mse", "unbiased"),
    "rounding": ("nearest", "random"),
}


@dataclass(frozen=True)
class Factors:
    """rounds of the rotation; levels "lloyd-max" or "uniform", both the best for a Gaussian; scale of a block "mse" or
    "unbiased"; rounding "nearest" or "random", to a neighbour with the chance that is right in the mean."""

    rounds: int = 1
    levels: str = "lloyd-max"
    scale: str = "unbiased"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            one_of(name, getattr(self, name), known)

    def roundtrip(self, x: Tensor, bits: int, block: int, seed: int) -> Tensor:
        """Decoded ``x``, fp32 of the same shape. seed: of the signs and of what is rounded at random."""
        flat = x.float().reshape(-1)
        x_NB = F.pad(flat, (0, -flat.numel() % block)).view(-1, block)
        z_NB = rotate(x_NB, self.rounds, seed) if self.rounds else x_NB
        rms_N = z_NB.norm(dim=1) * block**-0.5
        u_NB = z_NB / torch.where(rms_N > 0, rms_N, 1.0)[:, None]
        q_NB = self._quantized(u_NB, bits, seed)
        dot_N = (z_NB * q_NB).sum(1)
        s_N = dot_N / (q_NB * q_NB).sum(1) if self.scale == "mse" else (z_NB * z_NB).sum(1) / dot_N
        s_N = torch.where(rms_N > 0, s_N, 0.0)
        y_NB = (unrotate(q_NB, self.rounds, seed) if self.rounds else q_NB) * s_N[:, None]
        return y_NB.reshape(-1)[: flat.numel()].view(x.shape)

    def _quantized(self, u_NB: Tensor, bits: int, seed: int) -> Tensor:
        levels_L = uniform_levels(bits) if self.levels == "uniform" else torch.tensor(lloyd_max(bits)[0])
        levels_L = levels_L.to(u_NB)
        if self.rounding == "nearest":
            return _at(levels_L, _above(u_NB, (levels_L[1:] + levels_L[:-1]) / 2))
        return rounded_at_random(u_NB, levels_L, seed)


def _above(u: Tensor, edges_E: Tensor) -> Tensor:
    """How many of at most 255 ascending edges lie below each number; by comparisons, which vectorize, where few."""
    if len(edges_E) > 16:
        return torch.bucketize(u, edges_E)
    count = torch.zeros(u.shape, dtype=torch.uint8, device=u.device)
    for edge in edges_E:
        count.add_(u > edge)
    return count


def _at(values_L: Tensor, index: Tensor) -> Tensor:
    return values_L.index_select(0, index.int().flatten()).view(index.shape)


def rounded_at_random(u: Tensor, levels_L: Tensor, seed: int) -> Tensor:
    """One of the two levels around each number, right in the mean; what lies beyond the last level becomes it."""
    below = _above(u, levels_L[1:-1])
    low, high = _at(levels_L, below), _at(levels_L[1:], below)
    chance = (dither(seed, u.numel(), u.device).view(u.shape).float() + 0.5) / 65536
    return torch.where(u - low > chance * (high - low), high, low)


@lru_cache
def uniform_levels(bits: int) -> Tensor:
    """Evenly spaced levels without zero, fp32 ascending [L], whose step loses a standard Gaussian the least."""
    int_in("bits", bits, 1, 8)
    places, step = np.arange(2**bits) - (2**bits - 1) / 2, 4.0 / 2**bits
    for _ in range(2000):  # to the best step for the cells of the last one, and so on
        edges = np.concatenate([[-np.inf], (places[1:] + places[:-1]) / 2 * step, [np.inf]])
        mass, first = _gaussian_integrals(edges)
        before, step = step, float((places * first).sum() / (places**2 * mass).sum())
        if abs(step - before) < 1e-12:
            break
    return torch.tensor(places * step, dtype=torch.float32)


def qsgd(x: Tensor, bits: int, block: int, seed: int) -> Tensor:
    """QSGD with the largest magnitude of a block as its scale: integers -(2**(b-1) - 1) ... 2**(b-1) - 1, rounded at
    random; fp32 of the shape of ``x``."""
    int_in("bits", bits, 2, 8)
    flat = x.float().reshape(-1)
    x_NB = F.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    top = 2 ** (bits - 1) - 1
    scale_N1 = x_NB.abs().amax(1, keepdim=True) / top
    levels_L = torch.arange(-top, top + 1, dtype=torch.float32, device=x.device)
    y_NB = rounded_at_random(x_NB / torch.where(scale_N1 > 0, scale_N1, 1.0), levels_L, seed) * scale_N1
    return y_NB.reshape(-1)[: flat.numel()].view(x.shape)

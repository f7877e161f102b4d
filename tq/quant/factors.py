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
from torch import Tensor

from tq.quant.codebook import _gaussian_integrals, lloyd_max
from tq.quant.formats import above, at, blocks, nearest, safe, unblocks
from tq.quant.rotation import dither, rotate
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
        x_NB, turn_BB = blocks(x, block), rotation(block, self.rounds, seed, str(x.device))
        z_NB = x_NB if turn_BB is None else x_NB @ turn_BB
        rms_N = z_NB.norm(dim=1) * block**-0.5
        u_NB = z_NB / safe(rms_N)[:, None]
        q_NB = self._quantized(u_NB, bits, seed)
        dot_N = (z_NB * q_NB).sum(1)
        s_N = dot_N / (q_NB * q_NB).sum(1) if self.scale == "mse" else (z_NB * z_NB).sum(1) / dot_N
        s_N = torch.where(rms_N > 0, s_N, 0.0)
        return unblocks((q_NB if turn_BB is None else q_NB @ turn_BB.T) * s_N[:, None], x)

    def _quantized(self, u_NB: Tensor, bits: int, seed: int) -> Tensor:
        levels_L = uniform_levels(bits) if self.levels == "uniform" else torch.tensor(lloyd_max(bits)[0])
        levels_L = levels_L.to(u_NB)
        if self.rounding == "nearest":
            return nearest(u_NB, levels_L)
        return rounded_at_random(u_NB, levels_L, seed)


@lru_cache(maxsize=256)
def rotation(block: int, rounds: int, seed: int, device: str) -> Tensor | None:
    """fp32 [B, B] that rows are multiplied by from the right, faster here than butterflies; None without rounds."""
    return rotate(torch.eye(block, device=device), rounds, seed) if rounds else None


def rounded_at_random(u: Tensor, levels_L: Tensor, seed: int) -> Tensor:
    """One of the two levels around each number, right in the mean; what lies beyond the last level becomes it."""
    below = above(u, levels_L[1:-1])
    low, high = at(levels_L, below), at(levels_L[1:], below)
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
    x_NB = blocks(x, block)
    top = 2 ** (bits - 1) - 1
    scale_N1 = x_NB.abs().amax(1, keepdim=True) / top
    levels_L = torch.arange(-top, top + 1, dtype=torch.float32, device=x.device)
    return unblocks(rounded_at_random(x_NB / safe(scale_N1), levels_L, seed) * scale_N1, x)

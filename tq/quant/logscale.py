"""Unsigned numbers on a logarithmic scale, 2-8 bits: for second moments, which a codebook through zero would destroy.

A block of B numbers keeps the exponents of its smallest and its largest non-zero number (two fp16); the codes from 1
on are the levels evenly spaced between them in log2, code 0 is zero itself. Between two levels a number is rounded up
or down at random so that its mean is right: a moving average that changes by a thousandth would otherwise never move.
The randomness comes from the step's number, so a resumed run repeats it.
A non-zero number never becomes zero: those more than ``RANGE`` octaves under the largest rise to the lowest level.

Sources: linear levels without zero and the trouble with zero are Li, Chen & Zhu 2023 (arXiv:2309.01507); stochastic
rounding to the levels of a logarithm is as old as QSGD's natural variant (Horvath et al. 2019).

Shapes: N blocks, B block size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.rotation import derive_seed

RANGE = 30.0  # octaves of a block that are told apart


@dataclass(frozen=True)
class LogCodec:
    """Settings; a bad argument raises here. bits: 2-8 an element; block: numbers that share a range."""

    bits: int = 8
    block: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}")
        if not isinstance(self.block, int) or self.block < 8 or self.block % 8:
            raise ValueError(f"block must be a positive multiple of 8, got {self.block!r}")

    @property
    def bits_per_element(self) -> float:
        """Stored bits an element, the range of the block included."""
        return self.bits + 32 / self.block

    def encode(self, v: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        """(codes uint8 [N, B * bits / 8], ranges fp16 [N, 2]) of fp32 numbers >= 0, any shape, padded with zeros.

        step: seeds the rounding. A block with a NaN, an infinity or a negative number gets NaN for its range.
        """
        v_NB = F.pad(v.reshape(-1), (0, -v.numel() % self.block)).view(-1, self.block)
        exponents = torch.log2(v_NB)
        high = exponents.amax(1, keepdim=True)
        low = torch.where(v_NB > 0, exponents, torch.inf).amin(1, keepdim=True)
        bad = ~(high < torch.inf)  # NaN too
        empty = torch.isinf(low)  # nothing but zeros
        high = torch.where(empty, 0.0, high)
        low = torch.where(empty, 0.0, torch.maximum(low, high - RANGE))
        ranges = torch.cat([torch.floor(low * 32) / 32, torch.ceil(high * 32) / 32], 1).half()
        ranges[bad.squeeze(1)] = torch.nan
        low, width = self._grid(ranges)
        place = ((exponents - low) / width).clamp(0, (1 << self.bits) - 2)
        below = torch.floor(place)
        share = torch.expm1((place - below) * width * math.log(2)) / torch.expm1(width * math.log(2))
        generator = torch.Generator(v.device).manual_seed(derive_seed(0, "log", step) & 0x7FFFFFFFFFFFFFFF)
        dither = torch.rand(v_NB.shape, generator=generator, device=v.device)
        codes = 1 + below + (dither < share)
        codes = torch.where(v_NB > 0, codes, 0.0).to(torch.uint8)
        return self._pack(codes), ranges

    def decode(self, codes: Tensor, ranges: Tensor, numel: int) -> Tensor:
        """fp32 [numel]; the inverse of ``encode`` up to its rounding."""
        index = self._unpack(codes)
        low, width = self._grid(ranges)
        levels = torch.exp2(low + (index - 1.0) * width)
        return torch.where((index > 0) | levels.isnan(), levels, 0.0).view(-1)[:numel]

    def _grid(self, ranges: Tensor) -> tuple[Tensor, Tensor]:
        low, high = ranges.float().split(1, 1)
        return low, ((high - low) / ((1 << self.bits) - 2)).clamp_min(2.0**-20)

    def _pack(self, codes: Tensor) -> Tensor:
        packed, parts = codes[:, :: 8 // self.bits].clone(), 8 // self.bits
        for part in range(1, parts):
            packed |= codes[:, part::parts] << (part * self.bits)
        return packed

    def _unpack(self, packed: Tensor) -> Tensor:
        if self.bits == 8:
            return packed
        mask = (1 << self.bits) - 1
        return torch.stack([packed >> shift & mask for shift in range(0, 8, self.bits)], 2).flatten(1)

"""Non-negative numbers on a logarithmic scale in 2, 4 or 8 bits, for second moments: a grid through zero ruins them.

The bits of a float, read as an integer, grow linearly between powers of two: they are a logarithm that costs nothing.
A block of B numbers keeps the upper halves of the bits of its smallest and its largest non-zero number (together 4
bytes); the codes from 1 on are levels evenly spaced between the two, code 0 is zero itself. Between two levels a number
is rounded up or down at random so that its mean is right: a moving average that changes by a thousandth would
otherwise never move. The randomness comes from the step's number, so a resumed run repeats it. A non-zero number never
becomes zero: those more than ``RANGE`` octaves under the largest rise to the lowest level.

Sources: Li, Chen & Zhu 2023 (arXiv:2309.01507) for the trouble with zero in second moments.

Shapes: N blocks, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.rotation import derive_seed

RANGE = 30  # octaves of a block that are told apart
_OCTAVE, _INFINITY, _NAN = 1 << 23, 0x7F800000, 0x7FC0


@lru_cache(maxsize=1)
def _cpu() -> ModuleType | None:
    """The CPU kernels; None where Numba is not installed or cannot run."""
    if find_spec("numba") is None:
        return None
    try:
        from tq.kernels import logscale
    except ImportError:
        return None
    return logscale


def _kernel(x: Tensor) -> ModuleType | None:
    """What works on ``x`` faster than PyTorch's operations, and gives the same."""
    return _cpu() if x.device.type == "cpu" and x.numel() else None


@dataclass(frozen=True)
class LogCodec:
    """Settings; a bad argument raises here. bits: 2, 4 or 8 an element; block: numbers that share a range."""

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
        """(codes uint8 [N, B * bits / 8], ranges int16 [N, 2]) of fp32 numbers >= 0, any shape, padded with zeros.

        step: seeds the rounding. A block with a NaN, an infinity or a negative number decodes to NaN.
        """
        kernel = _kernel(v)
        if kernel is not None:
            blocks = -(-v.numel() // self.block)
            codes = torch.empty(blocks, self.block * self.bits // 8, dtype=torch.uint8)
            ranges, words = torch.empty(blocks, 2, dtype=torch.int16), self._words(blocks * self.block, "cpu", step)
            kernel.encode(v.contiguous(), codes, ranges, words, self.block, self.bits, RANGE)
            return codes, ranges
        v_NB = F.pad(v.reshape(-1), (0, -v.numel() % self.block)).view(-1, self.block)
        place_NB = v_NB.view(torch.int32)
        high = place_NB.amax(1, keepdim=True)
        low = torch.where(place_NB == 0, _INFINITY, place_NB).amin(1, keepdim=True)
        bad = ((high >= _INFINITY) | (low < 0)).squeeze(1)
        low = torch.minimum(torch.maximum(low, high - RANGE * _OCTAVE), high)
        ranges = torch.cat([low >> 16, (high + 0xFFFF) >> 16], 1).to(torch.int16)
        ranges[bad] = _NAN
        low, width = self._grid(ranges)
        below = ((place_NB - low).float() / width).floor_().clamp_(0, (1 << self.bits) - 2)
        lower = self._level(low, width, below)
        gap = self._level(low, width, below + 1).sub_(lower)
        up = self._dither(v_NB, step) * gap < v_NB - lower
        codes = below.add_(1).add_(up).mul_(place_NB != 0).to(torch.uint8)
        return self._pack(codes), ranges

    def decode(self, codes: Tensor, ranges: Tensor, numel: int) -> Tensor:
        """fp32 [numel]; the inverse of ``encode`` up to its rounding."""
        kernel = _kernel(codes)
        if kernel is not None:
            out = torch.empty(numel)
            kernel.decode(codes, ranges, out, self.block, self.bits)
            return out
        index = self._unpack(codes)
        low, width = self._grid(ranges)
        levels = self._level(low, width, (index.float() - 1.0).clamp_min_(0.0)).mul_(index != 0)
        levels[ranges[:, 1] == _NAN] = torch.nan
        return levels.view(-1)[:numel]

    def _grid(self, ranges: Tensor) -> tuple[Tensor, Tensor]:
        """(bits of the lowest level, distance between levels in fp32) [N, 1] each."""
        low, high = (ranges.int() << 16).split(1, 1)
        return low, ((high - low).float() / ((1 << self.bits) - 2)).clamp_min_(1.0)

    @staticmethod
    def _level(low: Tensor, width: Tensor, index: Tensor) -> Tensor:
        return (low + (index * width).int()).view(torch.float32)

    @staticmethod
    def _words(count: int, device: torch.device | str, step: int) -> Tensor:
        """int16 [count] at random, from the step's number."""
        generator = torch.Generator(device).manual_seed(derive_seed(0, "log", step) & 0x7FFFFFFFFFFFFFFF)
        words = torch.empty(count // 4, dtype=torch.int64, device=device)
        return words.random_(-(1 << 63), None, generator=generator).view(torch.int16)

    def _dither(self, like_NB: Tensor, step: int) -> Tensor:
        """Uniform in (0, 1), 16 bits of randomness each."""
        words = self._words(like_NB.numel(), like_NB.device, step)
        return words.view(like_NB.shape).float().add_(32768.5).mul_(1 / 65536)

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

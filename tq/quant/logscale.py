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

import torch
from torch import Tensor

from tq.quant import dispatch
from tq.quant.memory import memory_range
from tq.quant.rotation import derive_seed, step_seed
from tq.quant.settings import int_in, one_of

RANGE = 30  # octaves of a block that are told apart
DITHER_SEED = derive_seed(0, "log")  # that the steps' are under


@dataclass(frozen=True)
class LogCodec:
    """Settings; a bad argument raises here. bits: 2, 4 or 8 an element; block: numbers that share a range."""

    bits: int = 8
    block: int = 128

    def __post_init__(self) -> None:
        int_in("bits", self.bits, 2, 8)
        one_of("bits", self.bits, (2, 4, 8))
        int_in("block", self.block, 8, 2**31 - 8)
        if self.block % 8:
            raise ValueError(f"block must be a positive multiple of 8, got {self.block!r}")

    @property
    def bits_per_element(self) -> float:
        """Stored bits an element, the range of the block included."""
        return self.bits + 32 / self.block

    @staticmethod
    def dither_seed(step: int) -> int:
        """Seed of the rounding in a step."""
        return step_seed(DITHER_SEED, step)

    def encode(self, v: Tensor, step: int = 0, impl: str = "auto") -> tuple[Tensor, Tensor]:
        """(codes uint8 [N, B * bits / 8], ranges int16 [N, 2]) of fp32 numbers >= 0, any shape, padded with zeros.

        step: an int >= 0, seeds the rounding. impl: "auto", "reference", "cpu" or "triton". A block with a NaN, an
        infinity or a negative number decodes to NaN. Raises TypeError for other inputs than fp32 tensors in memory of
        their own.
        """
        memory_range("v", v)
        if v.dtype != torch.float32:
            raise TypeError(f"v must be float32, got {v.dtype}")
        v = v.detach().resolve_neg().contiguous()
        blocks = -(-v.numel() // self.block)
        codes = torch.empty(blocks, self.block * self.bits // 8, dtype=torch.uint8, device=v.device)
        ranges = torch.empty(blocks, 2, dtype=torch.int16, device=v.device)
        if blocks:
            seed = self.dither_seed(step)
            dispatch.log_encode(v, codes, ranges, seed, impl, block=self.block, bits=self.bits, octaves=RANGE)
        return codes, ranges

    def decode(self, codes: Tensor, ranges: Tensor, numel: int, impl: str = "auto") -> Tensor:
        """fp32 [numel]; the inverse of ``encode`` up to its rounding.

        Raises TypeError or ValueError for what ``encode`` of ``numel`` numbers cannot have given.
        """
        int_in("numel", numel, 0, 2**60)
        blocks = -(-numel // self.block)
        wanted = {
            "codes": (codes, torch.uint8, (blocks, self.block * self.bits // 8)),
            "ranges": (ranges, torch.int16, (blocks, 2)),
        }
        for name, (tensor, dtype, shape) in wanted.items():
            memory_range(name, tensor)
            if (tensor.dtype, tuple(tensor.shape), tensor.device) != (dtype, shape, codes.device):
                raise ValueError(
                    f"{name} must be {dtype} of shape {shape} on {codes.device} for {numel} numbers; "
                    f"got {tensor.dtype}, {tuple(tensor.shape)}, {tensor.device}"
                )
        out = torch.empty(numel, device=codes.device)
        if numel:
            codes, ranges = (tensor.resolve_neg().contiguous() for tensor in (codes, ranges))
            dispatch.log_decode(codes, ranges, out, impl, block=self.block, bits=self.bits)
        return out

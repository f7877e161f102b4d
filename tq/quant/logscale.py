"""Non-negative values on a logarithmic scale in 2, 4 or 8 bits, for second moments: a grid through zero ruins them.

The bits of a float, read as an integer, grow linearly between powers of two: they are a logarithm that costs nothing.
A block of B elements keeps the upper halves of the bits of its smallest and its largest non-zero element (together 4
bytes); indices from 1 on are levels evenly spaced between the two, index 0 is zero itself. Between two levels a value
is rounded up or down at random so that its mean is right: a moving average that changes by a thousandth would
otherwise never move. The randomness comes from the step's number, so a resumed run repeats it. A non-zero value never
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
    """Logarithmic codec of non-negative values, such as Adam's second moments, with unbiased stochastic rounding.

    Args:
        bits: 2, 4 or 8 bits per element.
        block: elements that share a range, a positive multiple of 8.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is out of range.

    References:
        Li, Chen & Zhu 2023 (arXiv:2309.01507) for the trouble with zero in second moments. The format is this
        project's.

    Example:
        >>> import torch
        >>> from tq.quant.logscale import LogCodec
        >>> v = torch.tensor([0.0, 1e-9, 1e-6, 1e-3])
        >>> codec = LogCodec(bits=8, block=128)
        >>> codes, ranges = codec.encode(v, step=1)
        >>> codes.nbytes + ranges.nbytes, codec.bits_per_element
        (132, 8.25)
        >>> (codec.decode(codes, ranges, v.numel()) > 0).tolist()  # zero stays zero, nothing else becomes zero
        [False, True, True, True]
    """

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
        """Stored bits per element (float), bits + 32 / block: the range of the block is included."""
        return self.bits + 32 / self.block

    @staticmethod
    def dither_seed(step: int) -> int:
        """Seed (int) of the rounding in step number ``step``."""
        return step_seed(DITHER_SEED, step)

    def encode(self, v: Tensor, step: int = 0, impl: str = "auto") -> tuple[Tensor, Tensor]:
        """Encode v block by block in row-major order; the last block is padded with zeros.

        Args:
            v: fp32, any shape, elements >= 0. A block with NaN, Inf or a negative value decodes to NaN.
            step: int >= 0, seeds the rounding.
            impl: "auto", "reference", "cpu" or "triton".

        Returns:
            tuple[Tensor, Tensor]: packed indices, uint8 [N, B * bits / 8], and ranges, int16 [N, 2], on the device of
            v.

        Raises:
            TypeError: v is not fp32, is a subclass or has no memory.
            ValueError: unknown ``impl``.
            RuntimeError: ``impl`` cannot run here.
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
        """Inverse of ``encode`` up to its rounding.

        Args:
            codes: from ``encode``.
            ranges: from ``encode``.
            numel: elements of the encoded tensor.
            impl: as in ``encode``.

        Returns:
            Tensor: fp32 [numel], flat, on the device of ``codes``.

        Raises:
            TypeError, ValueError: ``codes`` and ``ranges`` cannot be from ``encode`` of ``numel`` elements.
            RuntimeError: ``impl`` cannot run here.
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

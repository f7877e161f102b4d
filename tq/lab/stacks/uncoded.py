"""A codec that codes nothing: a block's message holds its numbers in fp32, as they are.

With it the backend, a hook and the optimizer do all that they do with codes, by the same threads, buckets, checks and
messages. So a comparison with it differs in the codec alone. It refuses rows of blocks, and marks no block with NaN or
Inf: these travel as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tq.quant.codec import Code, Codec


class Uncoded(Codec):
    """Fields as ``Codec``'s; all but ``block`` are without effect. A scale of one travels with each block, unused.

    Example:
        >>> import torch
        >>> from tq.lab.stacks.uncoded import Uncoded
        >>> codec, x = Uncoded(), torch.arange(300.0)
        >>> bool(codec.decode(codec.encode(x)).equal(x)), codec.bits_per_element
        (True, 32.25)
    """

    @property
    def packed_bytes(self) -> int:
        """Payload bytes of one block: those of its numbers in fp32."""
        return self.block * torch.float32.itemsize

    def encode(
        self, x: Tensor, out: Code | None = None, impl: str = "auto", *, factor: float = 1.0, rows: bool = False
    ) -> Code:
        """``factor * x`` in fp32; ``x`` of any shape and float dtype. ValueError for ``rows``."""
        if rows:
            raise ValueError("rows=True: only codes have rows of blocks")
        out = self.empty(tuple(x.shape), x.dtype, x.device) if out is None else out
        numbers, flat = out.payload.view(torch.float32).view(-1), x.detach().reshape(-1)
        numbers[: flat.numel()].copy_(flat if factor == 1.0 else flat * factor)
        numbers[flat.numel() :].zero_()
        out.scales.fill_(1.0)
        return out

    def decode(self, code: Code, out: Tensor | None = None, impl: str = "auto", *, accumulate: bool = False) -> Tensor:
        """To the dtype of what was encoded; ``out`` contiguous, in fp32 where it is added to."""
        numbers = code.payload.view(torch.float32).view(-1)[: math.prod(code.shape)]
        if out is None:
            out = torch.empty(code.shape, dtype=code.dtype, device=code.device)
        flat = out.detach().view(-1)
        if accumulate:
            flat.add_(numbers)
        else:
            flat.copy_(numbers)
        return out

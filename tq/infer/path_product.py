"""Matrices whose weights are paths through a trellis times a vector, straight from their bits, on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.infer.trellis import _DEVIATION, TrellisCode
from tq.kernels import path_product
from tq.quant.rotation import rotate

_ROOM = 16  # bytes that a kernel reads beyond the last ones


class PathProduct:
    """A matrix of paths, and the memory that a product with it works on.

    Args:
        code: the matrix, [O, I].
        integers: products of 8-bit integers, with a scale for each block of the vector; needs AVX-512 VNNI.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.path_product import PathProduct
        >>> from tq.infer.trellis import trellis
        >>> code = trellis(torch.randn(32, 128), torch.eye(128).double(), Codec(bits=3, block=64))
        >>> x = torch.randn(128)
        >>> bool((PathProduct(code, integers=False).run(x) - code.decode() @ x).abs().max() < 1e-4)
        True
    """

    def __init__(self, code: TrellisCode, integers: bool) -> None:
        self._codec, self._shape, self._integers = code.codec, code.shape, integers
        rows, block = code.shape[0], code.codec.block
        more, blocks = -rows % 16, len(code.scales) // rows
        scales_NO = F.pad(code.scales.view(rows, blocks).T, (0, more)).contiguous()
        size = scales_NO.element_size()
        held = scales_NO.view(torch.int16) if size == 2 else scales_NO
        payload = F.pad(code.payload, (0, _ROOM))
        self.nbytes = code.payload.nbytes + scales_NO.nbytes
        self._x = torch.zeros(blocks * block, dtype=torch.int32 if integers else torch.float32)
        self._scales, self._sums = torch.full((blocks,), 1 / _DEVIATION), torch.zeros(blocks, dtype=torch.int64)
        self._out = torch.zeros(rows + more)
        memory = (x.numpy() for x in (payload, held, self._x, self._scales, self._sums, self._out))
        self._call = path_product.prepared(*memory, code.codec.bits, block, size)

    def run(self, x_I: Tensor) -> Tensor:
        """The matrix times a vector: fp32 [O], written over by the next call; x_I: fp32 [I]."""
        codec, (rows, columns) = self._codec, self._shape
        padded = F.pad(x_I, (0, len(self._x) - columns)).view(-1, codec.block)
        turned_NB = rotate(padded, codec.rounds, codec.seed, codec.rotation)
        if self._integers:
            step_N = turned_NB.abs().amax(1) / 127
            whole_NB = (turned_NB / step_N.clamp(min=1e-30)[:, None]).round_()
            self._scales[:] = step_N / _DEVIATION
            self._sums[:] = -510 * whole_NB.sum(1).long()
            self._x.view(torch.int8).view(-1, 4)[:] = whole_NB.view(-1, 1).to(torch.int8)
        else:
            self._x[:] = turned_NB.reshape(-1)
        self._call()
        return self._out[:rows]

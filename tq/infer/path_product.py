"""Matrices whose weights are paths through a trellis times a vector, straight from their bits, on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from tq.infer.trellis import _DEVIATION, TrellisCode
from tq.kernels import path_product, token
from tq.quant.codec import Codec
from tq.quant.rotation import signs

FEW, MANY = 4, 16  # groups of 16 rows that a thread takes: of matrices that a cache holds, and of larger ones
_LARGE = 1 << 22  # bytes


class PathProduct:
    """Matrices of one input, stacked, and the memory that a product with them works on.

    Args:
        parts: the matrices, [O, I]: of one codec but for their bits, so many rows that 16 divides them.
        integers: products of 8-bit integers, with a scale for each block of the vector; fast with AVX-512 VNNI.
    Raises:
        ValueError: the matrices are others.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.path_product import PathProduct
        >>> from tq.infer.trellis import trellis
        >>> code = trellis(torch.randn(32, 128), torch.eye(128).double(), Codec(bits=3, block=64))
        >>> x, product = torch.randn(128), PathProduct([code], integers=False)
        >>> product.x[:] = x.numpy()
        >>> bool((torch.from_numpy(product.run()) - code.decode() @ x).abs().max() < 1e-4)
        True
    """

    def __init__(self, parts: Sequence[TrellisCode], integers: bool) -> None:
        codec, columns = parts[0].codec, parts[0].shape[1]
        if any(code.shape[0] % 16 or code.shape[1] % codec.block or not alike(code.codec, codec) for code in parts):
            raise ValueError(f"16 must divide the rows, blocks of {codec.block} the columns, and codecs be alike")
        if codec.rotation != "hadamard" or codec.block not in (64, 128, 256):
            raise ValueError(f"known are Hadamard rotations of 64, 128 or 256, got {codec}")
        held, self.nbytes = [], 0
        for code in parts:
            scales_NO = code.scales.view(code.shape[0], -1).T.contiguous()
            payload = F.pad(code.payload, (path_product.ROOM,) * 2).numpy()
            held.append((payload, _bits_of(scales_NO), code.codec.bits))
            self.nbytes += code.nbytes
        blocks = columns // codec.block
        self.x, self._out = np.zeros(columns, np.float32), np.zeros(sum(code.shape[0] for code in parts), np.float32)
        self._signs = signs(codec.block, codec.rounds, codec.seed).numpy()
        self._step, self._integers = np.float32(1 / _DEVIATION), integers
        self._exact, self._words = np.zeros(0 if integers else columns, np.float32), np.zeros(columns, np.int32)
        self._scales, self._sums = np.full(blocks, self._step, np.float32), np.zeros(blocks, np.int32)
        given = self._words if integers else self._exact
        together = MANY if self.nbytes > _LARGE else FEW
        memory = given, self._scales, self._sums, self._out
        self._call = path_product.prepared(held, *memory, codec.block, together)
        self.bits, self._size = {code.codec.bits for code in parts}, held[0][1].itemsize

    @property
    def settings(self) -> tuple[int, int, int, float]:
        """(0, bytes of a scale, 0, step of the values): what products of one kernel share; bits may differ."""
        return 0, self._size, 0, float(self._step)

    def places(self) -> tuple[np.ndarray, ...]:
        """Where all of it lies, as ``tq.kernels.blocks`` takes it."""
        memory = self._exact, self._words, self._scales, self._sums
        return self.x, self._signs, *memory, self._out, self._call.given

    def run(self) -> np.ndarray:
        """The products with what ``x`` holds, which is written over: fp32 [rows]."""
        memory = self._exact, self._words, self._scales, self._sums
        token.give_paths(self.x, self._signs, self._step, self._integers, *memory)
        self._call()
        return self._out


def alike(one: Codec, other: Codec) -> bool:
    """Whether codecs differ in nothing but their bits."""
    return dataclasses.replace(one, bits=other.bits) == other


def _bits_of(scales: torch.Tensor) -> np.ndarray:
    """As an array, those of bf16 as whole numbers, which NumPy has no other name for."""
    found: np.ndarray = (scales.view(torch.int16) if scales.element_size() == 2 else scales).numpy()
    return found

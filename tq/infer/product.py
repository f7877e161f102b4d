"""Matrices of few bits times a vector, again and again in the same memory, on the CPU.

Shapes: O rows, I columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tq.infer.layers import QuantizedLinear
from tq.kernels import matvec, token
from tq.kernels.matvec import BITS, integers_run
from tq.quant.codec import Codec
from tq.quant.dispatch import codebook
from tq.quant.rotation import signs

__all__ = ["BITS", "Exact", "Product", "integers_run", "plain"]


def plain(codec: Codec) -> bool:
    """Whether codes are what the kernels read: Hadamard rotations, and levels for Gaussian numbers."""
    return codec.rotation == "hadamard" and codec.codebook == "gaussian"


class Exact:
    """A matrix of numbers, and the memory that a product with it works on."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight, self.nbytes = weight_OI, weight_OI.nbytes
        self._x, self._y = torch.zeros(weight_OI.shape[1]), torch.zeros(weight_OI.shape[0])
        self.x = self._x.numpy()

    def run(self) -> np.ndarray:
        """The products with what ``x`` holds: fp32 [rows]."""
        return torch.mv(self._weight, self._x, out=self._y).numpy()


class Product:
    """Matrices of one input, stacked, and the memory that a product with them works on."""

    def __init__(self, parts: Sequence[QuantizedLinear], integers: bool) -> None:
        codec, columns = parts[0].codec, parts[0].shape[1]
        self._held = torch.cat([part.payload for part in parts]), torch.cat([part.scales for part in parts])
        self._bits = codec.bits
        rows = sum(part.shape[0] for part in parts)
        self.nbytes = sum(part.nbytes for part in self._held)
        self.x, self._y = np.zeros(columns, np.float32), torch.zeros(1, rows)
        self._signs = signs(codec.block, codec.rounds, codec.seed).numpy()
        vectors = matvec.Vectors(torch.zeros(1, columns), codec.block, codec.bits, integers)
        levels_L = codebook(codec.bits)[0]
        self._lanes, step = vectors.lanes, matvec.integer_step(codec.bits, levels_L) if integers else 0.0
        self._step, self._out = np.float32(step), self._y.numpy()[0]
        nothing = np.zeros(0, np.float32), np.zeros(0, np.int8), np.zeros(0, np.float32), np.zeros((0, 16), np.int32)
        self._given = list(nothing)
        if integers:
            self._given[1:] = vectors.values.view(-1).numpy(), vectors.scales.numpy(), vectors.sums.numpy()
        else:
            self._given[0] = vectors.values.view(-1).numpy()
        self._vectors, self._elements = vectors, rows * columns
        self._call = matvec.prepared(*self._held, vectors, codec.bits, levels_L, self._y)

    @property
    def settings(self) -> tuple[int, int, int, float]:
        """(bits, bytes of a scale, lanes, step of the levels as integers): what products of one kernel share."""
        return self._bits, self._held[1].element_size(), self._lanes, float(self._step)

    def places(self) -> tuple[np.ndarray, ...]:
        """Where all of it lies, as ``tq.kernels.blocks`` takes it."""
        return self.x, self._signs, *self._given, self._out, self._call.given

    def run(self) -> np.ndarray:
        """The products with what ``x`` holds, which is written over: fp32 [rows]."""
        token.give(self.x, self._signs, self._lanes, self._step, *self._given)
        self._call()
        return self._out

"""What a block codec is set to: the fields, their checks, and the sizes that follow from them. Nothing is coded here.

Below the codec and below the door to the kernels, which both read it.

Shapes: N blocks, B block size, W packed bytes a block.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property

import torch

from tq.quant.bits import packed_bytes
from tq.quant.codebook import MIN_DIM
from tq.quant.rotation import is_power_of_two

SCALES = ("paper", "mse", "unbiased", "norm")
ROTATIONS = ("hadamard", "haar")
CODEBOOKS = ("gaussian", "sphere")
NONFINITE = ("raise", "propagate")
SCALE_DTYPES = (torch.float32, torch.bfloat16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_NUMEL = 2**50  # torch computes strides and bytes in int64
MAX_HAAR_DIM = 4096  # a dense float64 matrix of 128 MiB


def int_in(name: str, value: object, low: int, high: int) -> None:
    """Raises unless ``value`` is an int from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int from {low} to {high}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")


def one_of(name: str, value: object, accepted: tuple[object, ...]) -> None:
    """Raises unless ``value`` is among ``accepted``."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}; got {value!r}")


def check_shape(shape: object) -> None:
    """Raises unless ``shape`` is a tuple of sizes that a tensor can have."""
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError(f"shape must be a tuple of sizes, got {shape!r}")
    if math.prod(n or 1 for n in shape) > MAX_NUMEL:
        raise ValueError(f"shape must have at most 2**50 elements, zeros counted as ones; got {shape}")


def as_matrix(shape: tuple[int, ...], rows: bool) -> tuple[int, int]:
    """Shape [rows, dim] as the kernels see it: one row for the whole tensor, or the rows of its last dimension."""
    if not rows:
        return 1, math.prod(shape)
    if not shape:
        raise ValueError("rows=True needs at least one dimension, got a scalar")
    return math.prod(shape[:-1]), shape[-1]


@dataclass(frozen=True)
class Settings:
    """Fields of a ``Codec``; see there. A bad argument raises here."""

    bits: int = 4
    block: int = 128
    scale: str = "unbiased"
    rounds: int = 2
    search: int = 1
    seed: int = 0
    _: KW_ONLY
    rotation: str = "hadamard"
    codebook: str = "gaussian"
    scale_dtype: torch.dtype = torch.float32
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        int_in("bits", self.bits, 1, 8)
        one_of("rotation", self.rotation, ROTATIONS)
        if self.rotation == "haar":
            int_in("block", self.block, MIN_DIM, MAX_HAAR_DIM)
        else:
            int_in("block", self.block, 64, 1024)
            if not is_power_of_two(self.block):
                raise ValueError(f"block must be a power of two with rotation='hadamard', got {self.block}")
        one_of("scale", self.scale, SCALES)
        int_in("rounds", self.rounds, 1, 3)
        int_in("search", self.search, 1, 64)
        int_in("seed", self.seed, 0, 2**64 - 1)
        one_of("codebook", self.codebook, CODEBOOKS)
        one_of("scale_dtype", self.scale_dtype, SCALE_DTYPES)
        if self.scale_dtype == torch.bfloat16 and self.bits > 6:
            raise ValueError(f"scale_dtype=torch.bfloat16 is accepted for bits <= 6, got bits={self.bits}")
        one_of("nonfinite", self.nonfinite, NONFINITE)

    @cached_property
    def unseeded(self) -> Settings:
        """The settings with the seed 0: what all codecs that differ in the seed alone share."""
        return Settings(**{field.name: getattr(self, field.name) for field in fields(self)} | {"seed": 0})

    @property
    def sphere_dim(self) -> int | None:
        """Dimension of the sphere codebook, None for the Gaussian one."""
        return self.block if self.codebook == "sphere" else None

    @property
    def packed_bytes(self) -> int:
        """Payload bytes W of one block, without its scale."""
        return packed_bytes(self.bits, self.block)

    @property
    def block_bytes(self) -> int:
        """Stored bytes of one block, its scale included."""
        return self.packed_bytes + self.scale_dtype.itemsize

    @property
    def bits_per_element(self) -> float:
        """Stored bits an element, scale included: bits + 8 * scale bytes / block (full blocks)."""
        return 8.0 * self.block_bytes / self.block

    def blocks(self, shape: tuple[int, ...], rows: bool = False) -> int:
        """Number N of blocks of a tensor of this shape; ``rows`` as in ``Codec.encode``."""
        count, dim = as_matrix(shape, rows)
        return count * -(-dim // self.block)

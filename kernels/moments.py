"""What the AdamW kernels of every device are given of moments in few bits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Coded(NamedTuple):
    """Moments in few bits: codes and scales of m, codes and ranges of v; and how they are to be read or written.

    rotation: block, rounds and seed of m's; dither: the seed of v's rounding.
    """

    payload: Tensor
    scales: Tensor
    codes: Tensor
    ranges: Tensor
    rotation: tuple[int, int, int]
    dither: int


class Settings(NamedTuple):
    """What fixes the codes of m and v: bits, scale as of a ``Codec``, codebook, octaves as of ``LogCodec``."""

    m_bits: int
    v_bits: int
    scale: str
    levels_L: Tensor
    thresholds: Tensor
    octaves: int

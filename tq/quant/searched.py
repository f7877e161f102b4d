"""Rival formats with the scale search of this project's codec, so that a comparison does not rest on the search.

Of each block the same multipliers are tried as ``Codec(search=...)`` tries, the codes with the largest cosine are kept,
and the scale stored is the least-squares one. Decoders stay as they are.

Shapes: N blocks, B block size, L levels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tq.quant.formats import E4M3_MAX, Format, blocks, nearest, nf4_levels, safe, unblocks
from tq.quant.scale_search import multipliers


def _codes_and_scales(x_NB: Tensor, levels_L: Tensor, tries: int) -> tuple[Tensor, Tensor]:
    """(levels chosen [N, B], least-squares scales [N, 1]) of the multiplier whose codes have the largest cosine."""
    unit_NB = x_NB / safe(x_NB.abs().amax(1, keepdim=True)) * levels_L.max()
    best_NB = torch.zeros_like(unit_NB)
    found_N1 = x_NB.new_full((len(x_NB), 1), -1.0)
    for m in multipliers(tries):
        q_NB = nearest(m * unit_NB, levels_L)
        cosine_N1 = (x_NB * q_NB).sum(1, keepdim=True) / safe(q_NB.norm(dim=1, keepdim=True))
        better_N1 = cosine_N1 > found_N1
        best_NB, found_N1 = torch.where(better_N1, q_NB, best_NB), torch.where(better_N1, cosine_N1, found_N1)
    return best_NB, (x_NB * best_NB).sum(1, keepdim=True) / safe(best_NB.square().sum(1, keepdim=True))


def _format(
    name: str, family: str, bits: float, levels_L: Tensor, *, block: int, tries: int,
    stored: Callable[[Tensor], Tensor],
) -> Format:  # fmt: skip
    def roundtrip(x: Tensor) -> Tensor:
        q_NB, scale_N1 = _codes_and_scales(blocks(x, block), levels_L.to(x.device), tries)
        return unblocks(q_NB * stored(scale_N1), x)

    return Format(f"{name}, search {tries}", family, bits, roundtrip)


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda scale_N1: scale_N1.to(dtype).float()


def nf4(block: int = 64, tries: int = 17, scale_dtype: torch.dtype = torch.float32) -> Format:
    """NF4 with searched scales."""
    bits = 4 + 8 * scale_dtype.itemsize / block
    return _format(f"NF4, B={block}", "nf4", bits, nf4_levels(), block=block, tries=tries, stored=_as(scale_dtype))


def nf4_double_quantized(tries: int = 17) -> Format:
    """NF4 with searched scales that are double quantized as QLoRA's: 4.127 bits."""

    def stored(scale_N1: Tensor) -> Tensor:
        mean = scale_N1.mean()
        centred_GN = blocks(scale_N1 - mean, 256)
        unit_G1 = safe(centred_GN.abs().amax(1, keepdim=True) / E4M3_MAX)
        coded = (centred_GN / unit_G1).to(torch.float8_e4m3fn).float() * unit_G1
        return (coded.reshape(-1)[: scale_N1.numel()] + mean).clamp(min=0).view_as(scale_N1)

    bits = 4 + 8 / 64 + 32 / (64 * 256)
    return _format("NF4 + double quant, B=64", "nf4", bits, nf4_levels(), block=64, tries=tries, stored=stored)


def integer(bits: int, block: int, tries: int = 17, scale_dtype: torch.dtype = torch.float32) -> Format:
    """Symmetric integers with searched scales in the place of the largest magnitude's."""
    top = 2 ** (bits - 1) - 1
    levels_L = torch.arange(-top, top + 1, dtype=torch.float32)
    stored = bits + 8 * scale_dtype.itemsize / block
    family = "int8" if bits > 4 else "int4"
    name = f"INT{bits}, B={block}"
    return _format(name, family, stored, levels_L, block=block, tries=tries, stored=_as(scale_dtype))

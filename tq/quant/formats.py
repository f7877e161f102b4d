"""Rival block formats as round trips with exact stored bits: NF4, FP4, MXFP4, NVFP4, FP8, MXFP8, INT absmax, affine.

What is compared is the information that survives, so each is x -> decoded x in fp32; nothing is packed and nothing is
fast here. Blocks are consecutive elements of the flattened tensor, zero-padded at the end. Finite fp32 input only.

Sources: NF4 and double quantization, QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E); MXFP4 and MXFP8, OCP
Microscaling Formats v1.0 (2023); NVFP4, NVIDIA (2025); FP8, Micikevicius et al. 2022 (arXiv:2209.05433); absmax INT8,
Dettmers et al. 2022 (arXiv:2110.02861).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.codec import Codec

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of a 4-bit float
E4M3_MAX, _E5M2_MAX = 448.0, 57344.0


@dataclass(frozen=True)
class Format:
    """family: which method it belongs to (colour in figures). bits_per_element: scales and zero points included."""

    name: str
    family: str
    bits_per_element: float
    roundtrip: Callable[[Tensor], Tensor]


def nmse(x: Tensor, y: Tensor) -> float:
    """Normalised mean squared error |x - y|^2 / |x|^2 in float64; 0 for a zero tensor decoded to zeros."""
    energy = x.double().square().sum()
    error = (x.double() - y.double()).square().sum()
    return float(error / energy) if energy > 0 else (0.0 if error == 0 else float("inf"))


def above(x: Tensor, edges_E: Tensor) -> Tensor:
    """How many of at most 255 ascending edges lie below each number; by comparisons, which vectorize, where few."""
    if len(edges_E) > 16:
        return torch.bucketize(x, edges_E)
    count = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for edge in edges_E:
        count.add_(x > edge)
    return count


def at(levels_L: Tensor, index: Tensor) -> Tensor:
    """The levels of these numbers, in their shape."""
    return levels_L.index_select(0, index.int().flatten()).view(index.shape)


def nearest(x: Tensor, levels_L: Tensor) -> Tensor:
    """The nearest of ascending levels to each number, the lower of two."""
    return at(levels_L, above(x, (levels_L[1:] + levels_L[:-1]) / 2))


def blocks(x: Tensor, block: int | None) -> Tensor:
    """fp32 [N, B] of the flat tensor, zeros at its end; None: one block."""
    flat = x.float().reshape(-1)
    return flat[None] if block is None else F.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def unblocks(y_NB: Tensor, like: Tensor) -> Tensor:
    """The shape of ``like`` from its blocks."""
    return y_NB.reshape(-1)[: like.numel()].view(like.shape)


def safe(scale: Tensor) -> Tensor:
    """Scales to divide by: 1 for those of blocks of zeros."""
    return torch.where(scale > 0, scale, 1.0)


@lru_cache(maxsize=1)
def nf4_levels() -> Tensor:
    """The 16 NF4 levels in [-1, 1], fp32 ascending, from normal quantiles (8 positive, zero, 7 negative)."""
    offset = 0.9677083  # QLoRA: mean of 1 - 1/(2 * 15) and 1 - 1/(2 * 16)
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    return (levels / levels.max()).float()


def _signed(magnitudes: tuple[float, ...]) -> Tensor:
    m = torch.tensor(magnitudes)
    return torch.cat([-m.flip(0)[:-1], m])


def _absmax(levels: Tensor, block: int | None, scale_dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Levels scaled so that the largest level meets the block's largest magnitude."""

    def roundtrip(x: Tensor) -> Tensor:
        x_NB = blocks(x, block)
        level_L = levels.to(x.device)
        scale_N1 = (x_NB.abs().amax(1, keepdim=True) / level_L.max()).to(scale_dtype).float()
        return unblocks(nearest(x_NB / safe(scale_N1), level_L) * scale_N1, x)

    return roundtrip


def _double_quantized(levels: Tensor, block: int, group: int) -> Callable[[Tensor], Tensor]:
    """QLoRA's double quantization: absmax scales less their mean, in groups of ``group``, stored as scaled E4M3."""

    def roundtrip(x: Tensor) -> Tensor:
        x_NB = blocks(x, block)
        scale_N = x_NB.abs().amax(1)
        mean = scale_N.mean()
        centred_GN = blocks(scale_N - mean, group)
        unit_G1 = safe(centred_GN.abs().amax(1, keepdim=True) / E4M3_MAX)
        coded = (centred_GN / unit_G1).to(torch.float8_e4m3fn).float() * unit_G1
        stored_N1 = (coded.reshape(-1)[: scale_N.numel()] + mean).clamp(min=0)[:, None]
        return unblocks(nearest(x_NB / safe(stored_N1), levels.to(x.device)) * stored_N1, x)

    return roundtrip


def _power_of_two_scale(x_NB: Tensor, largest_exponent: int) -> Tensor:
    """E8M0 shared scale 2**(floor(log2 amax) - largest_exponent) of the OCP specification, [N, 1]."""
    _, exponent_N1 = torch.frexp(x_NB.abs().amax(1, keepdim=True))  # amax = m * 2**e, m in [1/2, 1)
    return torch.exp2((exponent_N1 - 1 - largest_exponent).clamp(-127, 127).float())


def _mxfp4(x: Tensor) -> Tensor:
    x_NB = blocks(x, 32)
    scale_N1 = _power_of_two_scale(x_NB, 2)
    return unblocks(nearest(x_NB / scale_N1, _signed(E2M1).to(x.device)) * scale_N1, x)


def _nvfp4(x: Tensor) -> Tensor:
    x_NB = blocks(x, 16)
    tensor_scale = safe(x_NB.abs().amax() / (6.0 * E4M3_MAX))  # one fp32 a tensor
    scale_N1 = (x_NB.abs().amax(1, keepdim=True) / 6.0 / tensor_scale).to(torch.float8_e4m3fn).float() * tensor_scale
    return unblocks(nearest(x_NB / safe(scale_N1), _signed(E2M1).to(x.device)) * scale_N1, x)


def _fp8(dtype: torch.dtype, largest: float, block: int) -> Callable[[Tensor], Tensor]:
    def roundtrip(x: Tensor) -> Tensor:
        x_NB = blocks(x, block)
        scale_N1 = x_NB.abs().amax(1, keepdim=True) / largest
        return unblocks((x_NB / safe(scale_N1)).clamp(-largest, largest).to(dtype).float() * scale_N1, x)

    return roundtrip


def _mxfp8(x: Tensor) -> Tensor:
    x_NB = blocks(x, 32)
    scale_N1 = _power_of_two_scale(x_NB, 8)
    return unblocks((x_NB / scale_N1).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale_N1, x)


def integer(bits: int, block: int | None, scale_dtype: torch.dtype = torch.float32) -> Format:
    """Symmetric absmax integers -(2**(b-1) - 1) ... 2**(b-1) - 1 (the code -2**(b-1) unused).

    block: None for one scale a tensor, whose bits are then neglected.
    """
    top = 2 ** (bits - 1) - 1
    levels = torch.arange(-top, top + 1, dtype=torch.float32)
    stored = bits + (8 * scale_dtype.itemsize / block if block else 0.0)
    name = f"INT{bits} absmax, " + (f"B={block}" if block else "per tensor")
    return Format(name, "int8" if bits > 4 else "int4", stored, _absmax(levels, block, scale_dtype))


def affine(bits: int, block: int) -> Format:
    """Uniform levels from the block's minimum to its maximum; two bf16 numbers a block."""

    def roundtrip(x: Tensor) -> Tensor:
        x_NB = blocks(x, block)
        low_N1 = x_NB.amin(1, keepdim=True).bfloat16().float()
        step_N1 = ((x_NB.amax(1, keepdim=True) - low_N1) / (2**bits - 1)).bfloat16().float()
        code = ((x_NB - low_N1) / safe(step_N1)).round().clamp(0, 2**bits - 1)
        return unblocks(code * step_N1 + low_N1, x)

    return Format(f"uniform {bits} bit, B={block}", "uniform", bits + 32 / block, roundtrip)


def nf4(block: int, scale_dtype: torch.dtype = torch.float32) -> Format:
    """NF4 with one absmax scale a block; 4.5 bits at the published block of 64 with fp32 scales."""
    stored = 4 + 8 * scale_dtype.itemsize / block
    return Format(f"NF4, B={block}", "nf4", stored, _absmax(nf4_levels(), block, scale_dtype))


def nf4_double_quantized() -> Format:
    """NF4, blocks of 64, scales in 8 bits with an fp32 number for each 256 of them: 4.127 bits."""
    stored = 4 + 8 / 64 + 32 / (64 * 256)
    return Format("NF4 + double quant, B=64", "nf4", stored, _double_quantized(nf4_levels(), 64, 256))


def fp4(block: int, scale_dtype: torch.dtype = torch.float32) -> Format:
    """FP4 E2M1 with one absmax scale a block."""
    stored = 4 + 8 * scale_dtype.itemsize / block
    return Format(f"FP4 E2M1, B={block}", "fp4", stored, _absmax(_signed(E2M1), block, scale_dtype))


def mxfp4() -> Format:
    return Format("MXFP4, B=32", "mxfp4", 4 + 8 / 32, _mxfp4)


def nvfp4() -> Format:
    return Format("NVFP4, B=16", "nvfp4", 4 + 8 / 16, _nvfp4)


def fp8(kind: str = "e4m3", block: int = 128) -> Format:
    """FP8 E4M3 or E5M2 with one fp32 absmax scale a block."""
    if kind not in ("e4m3", "e5m2"):
        raise ValueError(f"kind must be 'e4m3' or 'e5m2', got {kind!r}")
    dtype, largest = (torch.float8_e4m3fn, E4M3_MAX) if kind == "e4m3" else (torch.float8_e5m2, _E5M2_MAX)
    return Format(f"FP8 {kind.upper()}, B={block}", "fp8", 8 + 32 / block, _fp8(dtype, largest, block))


def mxfp8() -> Format:
    return Format("MXFP8 E4M3, B=32", "mxfp8", 8 + 8 / 32, _mxfp8)


def of_codec(codec: Codec, name: str, family: str = "tq", impl: str = "auto") -> Format:
    """A setting of this project's codec as a ``Format``, so that it is measured by the same code as its rivals."""

    def roundtrip(x: Tensor) -> Tensor:
        return codec.decode(codec.encode(x.float(), impl=impl), impl=impl)

    return Format(name, family, codec.bits_per_element, roundtrip)

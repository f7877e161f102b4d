"""Rival block formats as round trips with exact stored bits: NF4, FP4, MXFP4, NVFP4, FP8, MXFP8, INT absmax, affine.

What is compared is the information that survives, so each is x -> decoded x in fp32; nothing is packed and nothing is
fast here. Blocks are consecutive elements of the flattened tensor, zero-padded at the end. Finite input only. Ties go
to the lower level, except where a cast or a rounding of torch (to FP8, to integers) breaks them to even.

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
    """A quantization format: a round trip, and the bits that it would store.

    Args:
        name: label in tables and figures.
        family: the method it belongs to; sets its colour in figures.
        bits_per_element: stored bits per element, scales and zero points included.
        roundtrip: x -> decoded x, fp32, of the shape and on the device of x. x is finite, which is not checked.

    Example:
        >>> import torch
        >>> from tq.quant.formats import Format, nmse
        >>> bf16 = Format("bf16", "cast", 16.0, lambda x: x.bfloat16().float())
        >>> x = torch.linspace(-1, 1, 1000)
        >>> bf16.bits_per_element, bf16.roundtrip(x).dtype, nmse(x, bf16.roundtrip(x)) < 1e-5
        (16.0, torch.float32, True)
    """

    name: str
    family: str
    bits_per_element: float
    roundtrip: Callable[[Tensor], Tensor]


def nmse(x: Tensor, y: Tensor) -> float:
    """Normalised mean squared error ``|x - y|^2 / |x|^2``, summed in float64.

    Args:
        x: the original, any shape and dtype.
        y: the decoded tensor, of the same shape.

    Returns:
        float: 0 for a zero tensor decoded to zeros, inf for one decoded to anything else.

    Raises:
        RuntimeError: the shapes do not broadcast.

    Example:
        >>> import torch
        >>> from tq.quant.formats import nmse
        >>> x = torch.tensor([3.0, 4.0])
        >>> nmse(x, torch.tensor([3.0, 3.5])), nmse(x, x)
        (0.01, 0.0)
    """
    energy = x.double().square().sum()
    error = (x.double() - y.double()).square().sum()
    return float(error / energy) if energy > 0 else (0.0 if error == 0 else float("inf"))


def above(x: Tensor, edges_E: Tensor) -> Tensor:
    """How many of at most 255 ascending edges lie below each element; by comparisons, which vectorize, where few."""
    if len(edges_E) > 16:
        return torch.bucketize(x, edges_E)
    count = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for edge in edges_E:
        count.add_(x > edge)
    return count


def at(levels_L: Tensor, index: Tensor) -> Tensor:
    """The levels at these indices, in their shape."""
    return levels_L.index_select(0, index.int().flatten()).view(index.shape)


def nearest(x: Tensor, levels_L: Tensor) -> Tensor:
    """The nearest of ascending levels to each element, the lower of two."""
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
    tensor_scale = safe(x_NB.abs().amax() / (6.0 * E4M3_MAX))  # one fp32 per tensor
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
    """Symmetric absmax integers -(2**(b-1) - 1) ... 2**(b-1) - 1; the integer -2**(b-1) is unused.

    Args:
        bits: b >= 2.
        block: elements that share a scale; None for one scale per tensor, whose bits are then neglected.
        scale_dtype: of the stored scales.

    Returns:
        Format: of family "int8" above 4 bits, else "int4"; bits + scale bits / block per element.

    References:
        Block-wise absmax scaling: Dettmers et al. 2022 (arXiv:2110.02861).

    Example:
        >>> import torch
        >>> from tq.quant.formats import integer
        >>> int8 = integer(bits=8, block=64)
        >>> int8.name, int8.bits_per_element
        ('INT8 absmax, B=64', 8.5)
        >>> int8.roundtrip(torch.tensor([-127.0, 0.4, 63.6])).tolist()
        [-127.0, 0.0, 64.0]
    """
    top = 2 ** (bits - 1) - 1
    levels = torch.arange(-top, top + 1, dtype=torch.float32)
    stored = bits + (8 * scale_dtype.itemsize / block if block else 0.0)
    name = f"INT{bits} absmax, " + (f"B={block}" if block else "per tensor")
    return Format(name, "int8" if bits > 4 else "int4", stored, _absmax(levels, block, scale_dtype))


def affine(bits: int, block: int) -> Format:
    """Uniform levels from the minimum of a block to its maximum; the minimum and the step are stored in bf16.

    Args:
        bits: bits per element, >= 1.
        block: elements that share minimum and step.

    Returns:
        Format: of family "uniform"; bits + 32 / block per element.

    Example:
        >>> import torch
        >>> from tq.quant.formats import affine
        >>> x = torch.linspace(0, 15, 16)
        >>> uniform = affine(bits=4, block=16)
        >>> uniform.bits_per_element, uniform.roundtrip(x).equal(x)
        (6.0, True)
    """

    def roundtrip(x: Tensor) -> Tensor:
        x_NB = blocks(x, block)
        low_N1 = x_NB.amin(1, keepdim=True).bfloat16().float()
        step_N1 = ((x_NB.amax(1, keepdim=True) - low_N1) / (2**bits - 1)).bfloat16().float()
        code = ((x_NB - low_N1) / safe(step_N1)).round().clamp(0, 2**bits - 1)
        return unblocks(code * step_N1 + low_N1, x)

    return Format(f"uniform {bits} bit, B={block}", "uniform", bits + 32 / block, roundtrip)


def nf4(block: int, scale_dtype: torch.dtype = torch.float32) -> Format:
    """NF4 with one absmax scale per block; 4.5 bits per element at the published block of 64 with fp32 scales.

    Args:
        block: elements that share a scale.
        scale_dtype: of the stored scales.

    Returns:
        Format: of family "nf4"; 4 + scale bits / block per element. Levels as in ``nf4_levels``.

    References:
        QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E).

    Example:
        >>> import torch
        >>> from tq.quant.formats import nf4, nmse
        >>> x = torch.randn(16384, generator=torch.Generator().manual_seed(0))
        >>> format = nf4(block=64)
        >>> format.bits_per_element, nmse(x, format.roundtrip(x)) < 0.009
        (4.5, True)
    """
    stored = 4 + 8 * scale_dtype.itemsize / block
    return Format(f"NF4, B={block}", "nf4", stored, _absmax(nf4_levels(), block, scale_dtype))


def nf4_double_quantized() -> Format:
    """NF4 in blocks of 64 with double quantization: scales in 8 bits (E4M3), an fp32 scale per 256 of them.

    Scales are quantized after their mean is subtracted; the mean, one fp32 per tensor, is neglected.

    Returns:
        Format: of family "nf4"; 4.127 bits per element.

    References:
        QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

    Example:
        >>> import torch
        >>> from tq.quant.formats import nf4_double_quantized, nmse
        >>> x = torch.randn(16384, generator=torch.Generator().manual_seed(0))
        >>> format = nf4_double_quantized()
        >>> round(format.bits_per_element, 3), nmse(x, format.roundtrip(x)) < 0.009
        (4.127, True)
    """
    stored = 4 + 8 / 64 + 32 / (64 * 256)
    return Format("NF4 + double quant, B=64", "nf4", stored, _double_quantized(nf4_levels(), 64, 256))


def fp4(block: int, scale_dtype: torch.dtype = torch.float32) -> Format:
    """FP4 E2M1 with one absmax scale per block: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.

    Args:
        block: elements that share a scale.
        scale_dtype: of the stored scales.

    Returns:
        Format: of family "fp4"; 4 + scale bits / block per element.

    References:
        The element format E2M1 is that of OCP Microscaling Formats v1.0 (2023).

    Example:
        >>> import torch
        >>> from tq.quant.formats import fp4
        >>> format = fp4(block=64)
        >>> format.bits_per_element, format.roundtrip(torch.tensor([0.4, 2.6, -6.0])).tolist()
        (4.5, [0.5, 3.0, -6.0])
    """
    stored = 4 + 8 * scale_dtype.itemsize / block
    return Format(f"FP4 E2M1, B={block}", "fp4", stored, _absmax(_signed(E2M1), block, scale_dtype))


def mxfp4() -> Format:
    """MXFP4: FP4 E2M1 in blocks of 32 with a power-of-two scale of 8 bits (E8M0).

    The scale is 2**(floor(log2 amax) - 2), as the specification proposes; larger values saturate.

    Returns:
        Format: of family "mxfp4"; 4.25 bits per element.

    References:
        OCP Microscaling Formats v1.0 (2023).

    Example:
        >>> import torch
        >>> from tq.quant.formats import mxfp4
        >>> format = mxfp4()
        >>> format.bits_per_element, format.roundtrip(torch.tensor([0.4, 2.6, -7.5])).tolist()
        (4.25, [0.5, 3.0, -6.0])
    """
    return Format("MXFP4, B=32", "mxfp4", 4 + 8 / 32, _mxfp4)


def nvfp4() -> Format:
    """NVFP4: FP4 E2M1 in blocks of 16 with an E4M3 scale per block and an fp32 scale per tensor.

    Returns:
        Format: of family "nvfp4"; 4.5 bits per element. The fp32 scale is neglected.

    References:
        NVIDIA (2025), NVFP4.

    Example:
        >>> import torch
        >>> from tq.quant.formats import mxfp4, nmse, nvfp4
        >>> x = torch.randn(16384, generator=torch.Generator().manual_seed(0))
        >>> format = nvfp4()
        >>> format.bits_per_element, nmse(x, format.roundtrip(x)) < nmse(x, mxfp4().roundtrip(x))
        (4.5, True)
    """
    return Format("NVFP4, B=16", "nvfp4", 4 + 8 / 16, _nvfp4)


def fp8(kind: str = "e4m3", block: int = 128) -> Format:
    """FP8 E4M3 or E5M2 with one fp32 absmax scale per block.

    Args:
        kind: "e4m3" (largest value 448) or "e5m2" (57344).
        block: elements that share a scale.

    Returns:
        Format: of family "fp8"; 8 + 32 / block per element.

    Raises:
        ValueError: unknown ``kind``.

    References:
        Micikevicius et al. 2022 (arXiv:2209.05433) for both formats.

    Example:
        >>> import torch
        >>> from tq.quant.formats import fp8, nmse
        >>> x = torch.randn(16384, generator=torch.Generator().manual_seed(0))
        >>> e4m3, e5m2 = fp8("e4m3"), fp8("e5m2")
        >>> e4m3.bits_per_element, nmse(x, e4m3.roundtrip(x)) < nmse(x, e5m2.roundtrip(x))
        (8.25, True)
    """
    if kind not in ("e4m3", "e5m2"):
        raise ValueError(f"kind must be 'e4m3' or 'e5m2', got {kind!r}")
    dtype, largest = (torch.float8_e4m3fn, E4M3_MAX) if kind == "e4m3" else (torch.float8_e5m2, _E5M2_MAX)
    return Format(f"FP8 {kind.upper()}, B={block}", "fp8", 8 + 32 / block, _fp8(dtype, largest, block))


def mxfp8() -> Format:
    """MXFP8: FP8 E4M3 in blocks of 32 with a power-of-two scale of 8 bits (E8M0).

    The scale is 2**(floor(log2 amax) - 8), as the specification proposes; larger values saturate.

    Returns:
        Format: of family "mxfp8"; 8.25 bits per element.

    References:
        OCP Microscaling Formats v1.0 (2023).

    Example:
        >>> import torch
        >>> from tq.quant.formats import mxfp8, nmse
        >>> x = torch.randn(16384, generator=torch.Generator().manual_seed(0))
        >>> format = mxfp8()
        >>> format.bits_per_element, nmse(x, format.roundtrip(x)) < 0.001
        (8.25, True)
    """
    return Format("MXFP8 E4M3, B=32", "mxfp8", 8 + 8 / 32, _mxfp8)


def of_codec(codec: Codec, name: str, family: str = "tq", impl: str = "auto") -> Format:
    """A setting of this project's codec as a ``Format``, so that it is measured by the same code as its rivals.

    Args:
        codec: the setting.
        name: label in tables and figures.
        family: sets its colour in figures.
        impl: as in ``Codec.encode``.

    Returns:
        Format: with codec.bits_per_element. Its round trip is in fp32 and raises what ``Codec.encode`` raises.

    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.quant.formats import nmse, of_codec
        >>> x = torch.randn(16384, generator=torch.Generator().manual_seed(0))
        >>> format = of_codec(Codec(bits=4, search=13), "TurboQuant 4 bit")
        >>> format.bits_per_element, round(nmse(x, format.roundtrip(x)), 3)
        (4.25, 0.008)
    """

    def roundtrip(x: Tensor) -> Tensor:
        return codec.decode(codec.encode(x.float(), impl=impl), impl=impl)

    return Format(name, family, codec.bits_per_element, roundtrip)

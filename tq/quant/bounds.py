"""Every bound and exact asymptotic that the book compares measurements with, as functions. Nothing here is measured.

D(b) is the distortion of the b-bit Lloyd-Max quantizer of N(0, 1); NMSE is E|x - y|^2 / |x|^2.
Sources: TurboQuant (arXiv:2504.19874) theorems 1-3; EDEN (Vargaftik et al. 2022); Panter & Dite 1951.
"""

from __future__ import annotations

import math

from tq.quant.codebook import distortion


def mse_upper(bits: float) -> float:
    """Upper bound on the NMSE of TurboQuant_mse: (sqrt(3) pi / 2) 4**-b, 2.7207 times the lower bound (theorem 1).

    It is the high-rate (Panter-Dite) constant, approached from below as b grows.
    """
    return math.sqrt(3.0) * math.pi / 2.0 * 4.0**-bits


def mse_lower(bits: float) -> float:
    """No quantizer of b bits an element has a smaller worst-case NMSE: 4**-b (theorem 3, from Shannon's bound)."""
    return 4.0**-bits


def prod_upper(bits: float, dim: int) -> float:
    """Bound on TurboQuant_prod's E(<y, x> - estimate)^2 over |x|^2 |y|^2: sqrt(3) pi^2 / d * 4**-b (theorem 2)."""
    return math.sqrt(3.0) * math.pi**2 / dim * 4.0**-bits


def prod_lower(bits: float, dim: int) -> float:
    """Lower bound on the same for any quantizer with b bits: 4**-b / d (theorem 3)."""
    return 4.0**-bits / dim


def prod_variance(bits: int, dim: int, sphere: bool = False) -> float:
    """Exact leading term of the same: (pi / 2) D(b - 1) / d, with D(0) = 1; ``sphere``: D of the sphere codebook."""
    base = distortion(bits - 1, dim if sphere else None) if bits > 1 else 1.0
    return math.pi / 2.0 * base / dim


def qjl_variance(residual_square: float, dim: int) -> float:
    """Variance bound of the 1-bit QJL estimate of <y, r> over |y|^2: (pi / 2) |r|^2 / d for a residual r."""
    return math.pi / 2.0 * residual_square / dim


def paper_nmse(bits: int, dim: int | None = None) -> float:
    """NMSE with the stored scale "paper" for a block whose coordinates follow the codebook's source: D(b)."""
    return distortion(bits, dim)


def unbiased_nmse(bits: int, dim: int | None = None) -> float:
    """NMSE with the stored scale "unbiased": D / (1 - D). Removing the shrinkage 1 - D costs the factor 1 / (1 - D)."""
    d = distortion(bits, dim)
    return d / (1.0 - d)


def norm_nmse(bits: int, dim: int | None = None) -> float:
    """NMSE with the stored scale "norm": 2 (1 - sqrt(1 - D)), as the cosine of a centroid quantizer is sqrt(1 - D)."""
    return 2.0 * (1.0 - math.sqrt(1.0 - distortion(bits, dim)))


def shrinkage(bits: int, dim: int | None = None) -> float:
    """Factor by which E[decode] shrinks x with the scales "paper" and "mse": 1 - D(b); 2 / pi at one bit."""
    return 1.0 - distortion(bits, dim)


def compression_ratio(bits_per_element: float, base_bits: float = 32.0) -> float:
    """Stored bits before over after, scales included: 7.53 for 4.25 bits against fp32."""
    return base_bits / bits_per_element

"""Lloyd-Max scalar quantizers for a rotated coordinate: N(0, 1), or one coordinate of a uniform point on a sphere.

Levels come from Lloyd's iteration with closed-form integrals (nothing is sampled, no table is typed in), polished by
Newton's method on the same fixed point: plain Lloyd needs about 4**bits sweeps. Both densities are log-concave, so the
fixed point is unique and is the optimum (Fleischer 1964; Trushkin 1982). Scalar, 1-8 bits. No entropy coding, no
vector codebooks.

Shapes: L = 2**bits levels; by symmetry only the positive half is solved for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# (mass, first moment) of a unit-variance density over the intervals between ascending edges t_0 < ... < t_n
Integrals = Callable[[Array], tuple[Array, Array]]
MIN_DIM = 3  # below, the density of a sphere coordinate is not log-concave and the optimum need not be unique


def _gaussian_integrals(edges: Array) -> tuple[Array, Array]:
    # erfc of the positive half keeps relative accuracy in the tail, where a difference of cdf values would cancel
    tail = np.array([0.5 * math.erfc(t / math.sqrt(2.0)) for t in edges])
    density = np.exp(-0.5 * edges**2) / math.sqrt(2.0 * math.pi)
    return tail[:-1] - tail[1:], density[:-1] - density[1:]


def _beta_fraction(x: Array, a: float, b: float) -> Array:
    """Incomplete beta B_x(a, b), not regularised, for x below (a + 1) / (a + b + 2), by its continued fraction.

    DLMF 8.17.22, evaluated by the modified Lentz method; every value keeps its relative accuracy, however small.
    """
    front = np.exp(a * np.log(x) + b * np.log1p(-x)) / a
    c, d = np.ones_like(x), 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    value = d.copy()
    for m in range(1, 2000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = value
        for term in (even, odd):
            d, c = 1.0 / (1.0 + term * d), 1.0 + term / c
            value = value * d * c
        if np.all(np.abs(value - before) <= 1e-14 * np.abs(value)):
            return front * value
    raise ArithmeticError(f"incomplete beta fraction did not converge for a={a}, b={b}")


def _sphere_integrals(dim: int) -> Integrals:
    # f(t) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) (1 - t^2)^((d-3)/2) on [-1, 1], so t^2 ~ Beta(1/2, (d-1)/2)
    a, root = (dim - 1) / 2.0, math.sqrt(dim)
    # Gamma(d/2) / Gamma((d-1)/2) by r(d + 2) = r(d) d / (d - 1): a difference of lgamma loses four digits at d = 3072
    ratio = 1.0 / math.sqrt(math.pi) if dim % 2 == 0 else math.sqrt(math.pi) / 2.0
    norm = ratio * math.prod(k / (k - 1) for k in range(2 + dim % 2, dim, 2)) / math.sqrt(math.pi)

    def integrals(edges: Array) -> tuple[Array, Array]:
        square = np.minimum(edges / root, 1.0) ** 2
        tail = np.full_like(square, 0.5)  # P(coordinate > edge)
        inner = (square > 0.0) & (square < 1.5 / (a + 2.5))
        outer = (square >= 1.5 / (a + 2.5)) & (square < 1.0)
        tail[inner] -= 0.5 * norm * _beta_fraction(square[inner], 0.5, a)
        tail[outer] = 0.5 * norm * _beta_fraction(1.0 - square[outer], a, 0.5)
        tail[square >= 1.0] = 0.0
        first = norm * (1.0 - square) ** a / (2.0 * a)  # int_t^1 u f(u) du
        return tail[:-1] - tail[1:], root * (first[:-1] - first[1:])

    return integrals


def _half_edges(half: Array, top: float) -> Array:
    return np.concatenate([[0.0], (half[1:] + half[:-1]) / 2.0, [top]])


def _solve(bits: int, integrals: Integrals, top: float) -> Array:
    """Positive half of the Lloyd-Max levels, ascending."""
    count = 2 ** (bits - 1)

    def centroids(half: Array) -> Array:
        mass, first = integrals(_half_edges(half, top))
        return first / mass

    # Start from Panter-Dite companding: levels at equal steps of int f^(1/3); for N(0,1) that is N(0, 3).
    grid = np.linspace(0.0, min(top, 12.0), 2001)
    mass, _ = integrals(grid)
    compand = np.concatenate([[0.0], np.cumsum(np.maximum(mass, 0.0) ** (1.0 / 3.0))])
    half = np.interp((np.arange(count) + 0.5) / count * compand[-1], compand, grid)
    for _ in range(20):  # Lloyd's iteration
        half = centroids(half)
    error = math.inf
    for _ in range(60):  # Newton on centroids(half) - half = 0
        residual = centroids(half) - half
        before, error = error, float(np.max(np.abs(residual)))
        if error < 1e-9 and error >= before / 2:  # quadratic convergence has met rounding
            break
        # Level i's centroid moves with levels i-1, i, i+1 only: perturbing every third level gives all columns at once.
        jacobian = -np.eye(count)
        step = 1e-6
        for colour in range(min(3, count)):
            bump = np.zeros(count)
            bump[colour::3] = step
            slope = (centroids(half + bump) - centroids(half - bump)) / (2.0 * step)
            for j in range(colour, count, 3):
                rows = slice(max(j - 1, 0), min(j + 2, count))
                jacobian[rows, j] += slope[rows]
        trial = half - np.linalg.solve(jacobian, residual)
        # outside the basin (levels out of order) fall back to a sweep of Lloyd, which always descends
        half = trial if trial[0] > 0 and np.all(np.diff(trial) > 0) and trial[-1] < top else centroids(half)
    if error > 1e-9:
        raise ArithmeticError(f"Lloyd-Max iteration did not converge for bits={bits}")
    return half


def _check(bits: int, dim: int | None) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"bits must be an integer from 1 to 8, got {bits!r}")
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < MIN_DIM):
        raise ValueError(f"dim must be None (Gaussian) or an integer of at least {MIN_DIM}, got {dim!r}")


def _source(dim: int | None) -> tuple[Integrals, float]:
    """Integrals of the density and the upper end of its support."""
    return (_gaussian_integrals, math.inf) if dim is None else (_sphere_integrals(dim), math.sqrt(dim))


@lru_cache(maxsize=256)
def _lloyd_max(bits: int, dim: int | None) -> tuple[Array, Array]:
    half = _solve(bits, *_source(dim))
    levels = np.concatenate([-half[::-1], half])
    thresholds = (levels[1:] + levels[:-1]) / 2.0
    levels.setflags(write=False)
    thresholds.setflags(write=False)
    return levels, thresholds


def lloyd_max(bits: int, dim: int | None = None) -> tuple[Array, Array]:
    """Optimal scalar quantizer of a unit-variance coordinate, which minimizes the mean squared error.

    Args:
        bits: 1-8.
        dim: None for N(0, 1); d >= 3 for sqrt(d) times a coordinate of a uniform point on the unit sphere of R^d
            (TurboQuant's density f, scaled to unit variance).

    Returns:
        tuple[ndarray, ndarray]: levels [2**bits] and thresholds [2**bits - 1], float64, ascending, read-only; the
        thresholds are the midpoints between levels.

    Raises:
        ValueError: ``bits`` or ``dim`` is no integer in its range.
        ArithmeticError: the iteration did not converge.

    References:
        Lloyd 1957/1982; Max 1960. TurboQuant (Zandieh et al., arXiv:2504.19874) for the density on the sphere.

    Example:
        >>> from tq.quant.codebook import lloyd_max
        >>> levels, thresholds = lloyd_max(bits=2)
        >>> [round(float(level), 4) for level in levels]
        [-1.5104, -0.4528, 0.4528, 1.5104]
        >>> [round(float(threshold), 4) for threshold in thresholds]
        [-0.9816, 0.0, 0.9816]
    """
    _check(bits, dim)
    return _lloyd_max(bits, dim)


def cell_probabilities(bits: int, dim: int | None = None) -> Array:
    """Probability of each index, float64 [2**bits]."""
    levels, _ = lloyd_max(bits, dim)
    integrals, top = _source(dim)
    mass, _ = integrals(_half_edges(levels[levels.size // 2 :], top))
    return np.concatenate([mass[::-1], mass])


def distortion(bits: int, dim: int | None = None) -> float:
    """Mean squared error of ``lloyd_max(bits, dim)`` on its own unit-variance source.

    Every level is its cell's centroid, so E[(x - q)^2] = E[x^2] - E[q^2] = 1 - sum p c^2.
    """
    levels, _ = lloyd_max(bits, dim)
    return float(1.0 - cell_probabilities(bits, dim) @ levels**2)


def index_entropy(bits: int, dim: int | None = None) -> float:
    """Entropy of the index in bits: what an ideal entropy coder would store instead of ``bits``."""
    p = cell_probabilities(bits, dim)
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())

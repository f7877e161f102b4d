"""Lloyd-Max codebooks: published digits, independent quadrature, optimality and the sphere's limits."""

import math

import numpy as np
import pytest
from scipy import integrate

from tq.quant import bounds
from tq.quant.codebook import cell_probabilities, distortion, index_entropy, lloyd_max

# Positive halves, MSE and index entropy as tabulated (Max 1960 and the specification), to every printed digit.
GOLDEN_LEVELS = {
    1: [0.797885],
    2: [0.452780, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590],
}
GOLDEN_MSE = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}
GOLDEN_MSE_128 = {1: 0.360889, 2: 0.116000, 3: 0.033966, 4: 0.009315}
GOLDEN_ENTROPY = {1: 1.0, 2: 1.9111, 3: 2.8249, 4: 3.7653}
SOURCES = [(b, d) for b in range(1, 9) for d in (None, 3, 4, 64, 128, 200, 1536)]


def _density(dim):
    """Density of a unit-variance coordinate and the end of its support, written down apart from the package."""
    if dim is None:
        return (lambda t: math.exp(-t * t / 2) / math.sqrt(2 * math.pi)), 39.0
    root = math.sqrt(dim)
    log_norm = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi)

    def density(x):
        rest = 1 - (x / root) ** 2
        return math.exp(log_norm + (dim - 3) / 2 * math.log(rest)) / root if rest > 0 else 0.0

    return density, root


def _moment(density, low, high, power):
    return integrate.quad(lambda t: t**power * density(t), low, high, epsabs=0, epsrel=1e-12, limit=200)[0]


@pytest.mark.parametrize("bits", GOLDEN_LEVELS)
def test_levels_to_every_printed_digit(bits):
    levels, thresholds = lloyd_max(bits)
    assert levels[levels.size // 2 :].round(6).tolist() == GOLDEN_LEVELS[bits]
    assert round(distortion(bits), 6) == GOLDEN_MSE[bits]
    assert round(distortion(bits, 128), 6) == GOLDEN_MSE_128[bits]
    assert round(index_entropy(bits), 4) == GOLDEN_ENTROPY[bits]
    assert np.array_equal(thresholds, (levels[1:] + levels[:-1]) / 2)


@pytest.mark.parametrize("bits,dim", SOURCES)
def test_every_level_is_its_cells_centroid_by_independent_quadrature(bits, dim):
    density, top = _density(dim)
    levels, thresholds = lloyd_max(bits, dim)
    edges = np.concatenate([[-top], thresholds, [top]])
    chosen = np.unique(np.linspace(0, levels.size - 1, 9).astype(int))
    for i in chosen:
        low, high = edges[i], edges[i + 1]
        if dim is None and i in (0, levels.size - 1):  # do not ask quad to find a bump in a long empty tail
            low, high = max(low, -12.0), min(high, 12.0)
        mass = _moment(density, low, high, 0)
        assert _moment(density, low, high, 1) / mass == pytest.approx(levels[i], abs=2e-10)
        assert mass == pytest.approx(cell_probabilities(bits, dim)[i], rel=1e-9)


@pytest.mark.parametrize("bits,dim", SOURCES)
def test_laws_of_the_codebook(bits, dim):
    levels, thresholds = lloyd_max(bits, dim)
    assert levels.shape == (2**bits,) and thresholds.shape == (2**bits - 1,) and levels.dtype == np.float64
    assert np.all(np.diff(levels) > 0) and np.array_equal(levels, -levels[::-1])
    assert cell_probabilities(bits, dim).sum() == pytest.approx(1.0, abs=1e-12)
    assert 0 <= index_entropy(bits, dim) <= bits + 1e-12
    if dim is None:
        assert bounds.mse_lower(bits) < distortion(bits) < bounds.mse_upper(bits)
    assert not levels.flags.writeable


@pytest.mark.parametrize("bits", range(1, 9))
def test_distortion_of_sampled_gaussians(bits):
    rng = np.random.default_rng(bits)
    levels, thresholds = lloyd_max(bits)
    x = rng.standard_normal(2_000_000)
    error = (x - levels[np.searchsorted(thresholds, x)]) ** 2
    assert abs(error.mean() - distortion(bits)) < 4 * error.std() / math.sqrt(x.size)


@pytest.mark.parametrize("bits", (1, 2, 4, 8))
def test_no_nearby_codebook_is_better(bits):
    """Brute force: moving any level of the optimum raises the exact error, to second order."""
    density, _ = _density(None)
    levels, _ = lloyd_max(bits)

    def error(codebook):
        edges = np.concatenate([[-12.0], (codebook[1:] + codebook[:-1]) / 2, [12.0]])
        grid, weight = np.polynomial.legendre.leggauss(24)
        total = 0.0
        for c, low, high in zip(codebook, edges[:-1], edges[1:], strict=True):
            pieces = np.linspace(low, high, 9 if high - low > 1 else 2)
            for a, b in zip(pieces[:-1], pieces[1:], strict=True):
                t = (a + b) / 2 + (b - a) / 2 * grid
                total += (b - a) / 2 * (weight * (t - c) ** 2 * np.exp(-t * t / 2)).sum() / math.sqrt(2 * math.pi)
        return total

    best = error(levels)
    assert best == pytest.approx(distortion(bits), rel=1e-6)
    spacing = np.diff(levels).min()
    for i in {0, levels.size // 2, levels.size - 1}:
        for sign in (-1, 1):
            moved = levels.copy()
            moved[i] += sign * 0.05 * spacing
            assert error(moved) > best


def test_uniform_source_gives_the_uniform_quantizer():
    """Archimedes: a coordinate of the 3-dimensional sphere is uniform, so its quantizer is known exactly."""
    for bits in range(1, 9):
        levels, _ = lloyd_max(bits, 3)
        n = 2**bits
        assert levels == pytest.approx(math.sqrt(3) * (2 * np.arange(n) + 1 - n) / n, abs=1e-9)
        assert distortion(bits, 3) == pytest.approx(4.0**-bits, rel=1e-7)


def test_sphere_tends_to_the_gaussian():
    gaps = [abs(distortion(4, d) - distortion(4)) for d in (64, 256, 1024, 4096)]
    assert all(a > 3.5 * b for a, b in zip(gaps, gaps[1:], strict=False))  # the gap falls as 1/d


def test_high_rate_limit_is_panter_dite():
    ratios = [distortion(b) / bounds.mse_upper(b) for b in range(1, 9)]
    assert all(a < b < 1 for a, b in zip(ratios, ratios[1:], strict=False)) and ratios[-1] > 0.98


@pytest.mark.parametrize("bits", (0, 9, -1))
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match=f"from 1 to 8, got {bits}"):
        lloyd_max(bits)


@pytest.mark.parametrize("bits,dim", [(2.0, None), (True, None), ("4", None), (4, 2), (4, 0), (4, 3.5), (4, True)])
def test_bad_arguments(bits, dim):
    with pytest.raises(ValueError, match="must be"):
        lloyd_max(bits, dim)

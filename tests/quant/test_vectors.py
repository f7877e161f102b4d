"""Search rivals: exactness by brute force, unbiasedness, and what k-means promises."""

import itertools
import math

import numpy as np
import pytest
import torch

from tq.quant import vectors
from tq.quant.codec import Codec
from tq.quant.formats import nmse


def gaussian(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


@pytest.mark.parametrize("half", (vectors.uniform_half(2), vectors.lloyd_half(2), vectors.uniform_half(3)))
def test_exact_search_finds_the_best_code_of_all(half):
    """Brute force over every sign-matched code of five coordinates."""
    z = gaussian(20, 5, seed=3)
    found = vectors.exact_search(z, half)
    codes = torch.tensor(list(itertools.product(half.tolist(), repeat=5)))
    for row, q in zip(z, found, strict=True):
        cosines = (codes @ row.abs()) / codes.norm(dim=1)
        assert torch.all((q > 0) == (row > 0))
        assert (q @ row / q.norm()).item() == pytest.approx(cosines.max().item(), rel=1e-6)


def test_exact_search_bounds_the_codecs_search():
    x = gaussian(400, 128, seed=1)
    exact = vectors.exact_search(x, vectors.lloyd_half(4))
    scale = (x * exact).sum(1) / exact.square().sum(1)
    best = nmse(x, exact * scale[:, None])
    by_k = [nmse(x, Codec(4, 128, "mse", 1, k).decode(Codec(4, 128, "mse", 1, k).encode(x))) for k in (1, 5, 17)]
    assert all(a > b for a, b in itertools.pairwise(by_k)) and by_k[-1] > best * 0.97  # another rotation, same law
    assert by_k[-1] < best * 1.03


@pytest.mark.parametrize("bits,search", [(1, True), (2, True), (4, True), (2, False)])
@pytest.mark.parametrize("grid", (vectors.uniform_half, vectors.lloyd_half))
def test_unbiased_over_haar_rotations(bits, search, grid):
    x = gaussian(1, 32, seed=7)
    y = torch.cat([vectors.unbiased_decode(x, grid(bits), s, "haar", search) for s in range(1500)])
    z = (y.mean(0) - x[0]) / (y.std(0) / math.sqrt(len(y)))
    assert z.abs().max() < 4.5


def test_one_bit_grids_agree():
    x = gaussian(50, 64)
    a, b = (vectors.unbiased_decode(x, grid(1), 3) for grid in (vectors.uniform_half, vectors.lloyd_half))
    assert torch.allclose(a, b, atol=1e-5)


def test_product_quantizer():
    centres = gaussian(64, 8, seed=1) * 5
    x = centres[torch.from_numpy(np.random.default_rng(2).integers(0, 64, 3000))] + 0.01 * gaussian(3000, 8, seed=3)
    error = [nmse(x, vectors.ProductQuantizer(4, i).fit(x).roundtrip(x)) for i in (1, 10)]
    assert error[1] <= error[0] < 1e-3  # 64 tight clusters fit into 256 centroids
    pq = vectors.ProductQuantizer(4).fit(x)
    assert torch.equal(pq.roundtrip(x), vectors.ProductQuantizer(4).fit(x).roundtrip(x))
    assert pq.roundtrip(x)[:, :4].unique(dim=0).shape[0] <= 256
    with pytest.raises(ValueError, match="at least 256"):
        vectors.ProductQuantizer(3).fit(x)
    with pytest.raises(ValueError, match="width"):
        vectors.ProductQuantizer(0)


def test_recall():
    base, query = gaussian(500, 16), gaussian(40, 16, seed=1)
    assert vectors.recall_1_at_k(base, base, query, (1, 2)) == {1: 1.0, 2: 1.0}
    noisy = vectors.recall_1_at_k(base, base + gaussian(500, 16, seed=2), query, (1, 4, 64))
    assert noisy[1] < noisy[4] <= noisy[64] <= 1 and noisy[1] > 1 / 500

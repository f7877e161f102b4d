"""Bounds that no other test meets: each against a measurement, or against the bound that it must respect."""

import math

import numpy as np
import pytest
import torch

from tq import Codec
from tq.quant import bounds

X = torch.from_numpy(np.random.default_rng(4).standard_normal((2048, 1024))).float()


@pytest.mark.parametrize("bits", range(1, 9))
def test_norm_scale(bits):
    # at 7 and 8 bits rare coordinates beyond the last level carry much of the error: the sample has to hold enough
    chunks = 12 if bits > 6 else 1
    x = torch.from_numpy(np.random.default_rng(bits).standard_normal((2048 * chunks, 1024), dtype=np.float32))
    codec = Codec(bits, 1024, "norm", codebook="sphere")
    ratio = ((x - codec.decode(codec.encode(x))).square().sum(1) / x.square().sum(1)).double()
    error = ratio.std().item() / len(x) ** 0.5
    # as for the unbiased scale, the formula is the limit of long blocks: one refitted scale takes about 2 in 1024 away
    assert abs(ratio.mean().item() - bounds.norm_nmse(bits, 1024)) < 4 * error + bounds.norm_nmse(bits, 1024) * 3 / 1024
    assert error < 0.01 * ratio.mean().item()


@pytest.mark.parametrize("bits", (1, 2, 4))
def test_shrinkage_of_the_paper_and_mse_scales(bits):
    expected = bounds.shrinkage(bits, 1024)
    for scale in ("paper", "mse"):
        codec = Codec(bits, 1024, scale, codebook="sphere")
        y = codec.decode(codec.encode(X))
        assert ((X * y).sum() / X.square().sum()).item() == pytest.approx(expected, abs=2e-3)
    assert bounds.shrinkage(1) == pytest.approx(2 / math.pi, rel=1e-9)


@pytest.mark.parametrize("bits", range(1, 9))
def test_products_lie_between_their_bounds(bits):
    for dim in (64, 128, 1536):
        exact = bounds.prod_variance(bits, dim)
        assert bounds.prod_lower(bits, dim) < exact < bounds.prod_upper(bits, dim)
        residual = 1.0 if bits == 1 else bounds.paper_nmse(bits - 1)
        assert bounds.qjl_variance(residual, dim) == pytest.approx(exact, rel=1e-12)
        assert bounds.prod_variance(bits, dim, sphere=True) <= exact


def test_unbiased_costs_more_than_least_squares():
    assert all(bounds.paper_nmse(b) < bounds.norm_nmse(b) < bounds.unbiased_nmse(b) for b in range(1, 9))
    assert bounds.compression_ratio(4.25) == pytest.approx(32 / 4.25)

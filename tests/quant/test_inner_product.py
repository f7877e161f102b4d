"""TurboQuant_prod: unbiased, with the variance that theory and the paper's specification state."""

import math

import numpy as np
import pytest
import torch

from tq.quant import bounds
from tq.quant.codec import Codec
from tq.quant.inner_product import ProdCodec

SPECIFIED = {1: 1.559, 2: 0.560, 3: 0.179, 4: 0.0524}  # variance times d / |y|^2 at d=128, simulated


def unit_rows(n, d, seed):
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d))).float()
    return x / x.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("bits", SPECIFIED)
def test_unbiased_with_the_stated_variance(bits):
    d, n, seeds = 128, 1000, 30
    x, y = unit_rows(n, d, 1), unit_rows(n, d, 2)
    codecs = [ProdCodec(bits, d, seed) for seed in range(seeds)]
    error = torch.stack([((codec.decode(codec.encode(x)) - x) * y).sum(1) for codec in codecs])
    assert abs(error.mean().item()) < 4 * error.std().item() / math.sqrt(error.numel())
    scaled = error.square().mean(1) * d  # by seed
    noise = scaled.std().item() / math.sqrt(seeds)
    assert abs(scaled.mean().item() - SPECIFIED[bits]) < 4 * noise + 0.01 * SPECIFIED[bits]
    # exact leading term, less the part along r that the projection fixes: a factor 1 - 2/(pi d) for random y
    theory = bounds.prod_variance(bits, d, sphere=True) * d * (1 - 2 / (math.pi * d))
    assert abs(scaled.mean().item() - theory) < 4 * noise + 0.005 * theory
    assert scaled.mean().item() < bounds.prod_upper(bits, d) * d


def test_eden_scale_has_less_variance_at_equal_bits():
    d = 128
    x, y = unit_rows(2000, d, 1), unit_rows(2000, d, 2)
    for bits in (1, 2, 4):
        prod, eden = [], []
        for s in range(10):
            p, e = ProdCodec(bits, d, s), Codec(bits, d, "unbiased", seed=s, rotation="haar", codebook="sphere")
            prod.append(((p.decode(p.encode(x)) - x) * y).sum(1).square().mean())
            eden.append(((e.decode(e.encode(x)) - x) * y).sum(1).square().mean())
        assert sum(eden) < sum(prod)


def test_sizes_shapes_and_refusals():
    codec = ProdCodec(3, 100)
    code = codec.encode(unit_rows(6, 100, 0).view(2, 3, 100))
    assert codec.decode(code).shape == (2, 3, 100)
    assert code.nbytes == 6 * (25 + 4 + 13 + 4)  # 2 bits of 100, norm, 1 bit of 100, residual norm
    assert ProdCodec(1, 64).encode(unit_rows(2, 64, 0)).nbytes == 2 * (8 + 4)
    assert torch.equal(codec.decode(codec.encode(torch.zeros(1, 100))), torch.zeros(1, 100))
    with pytest.raises(ValueError, match="last dimension of 100"):
        codec.encode(torch.zeros(3, 99))
    with pytest.raises(ValueError, match="NaN or Inf"):
        codec.encode(torch.full((1, 100), math.nan))
    with pytest.raises(TypeError, match="float64"):
        codec.encode(torch.zeros(1, 100, dtype=torch.float64))
    with pytest.raises(ValueError, match="bits"):
        ProdCodec(9, 100)
    with pytest.raises(ValueError, match="another dimension"):
        ProdCodec(3, 128).decode(code)

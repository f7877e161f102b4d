"""Long repetitions of the statistical laws, with intervals several times narrower than the everyday tests'."""

import math

import numpy as np
import pytest
import torch

from tq import Codec
from tq.quant.codebook import distortion

pytestmark = pytest.mark.soak
BLOCK = 128
I = np.arange(BLOCK)  # noqa: E741
NOISE = np.random.default_rng(6).standard_normal(BLOCK)
BLOCKS = {
    "gaussian": NOISE,
    "one-hot": (I == 17) * 1.0,
    "one large": np.where(I == 0, 100.0, NOISE),
    "pair": np.where(I == 0, 1.0, np.where(I == 1, 0.3, 0.0)),
    "constant": np.ones(BLOCK),
    "alternating": 1.0 - 2.0 * (I % 2),
    "two-level": np.where(BLOCK // 2 > I, 1.0, 0.1),
}


@pytest.mark.parametrize("bits", (1, 2, 4))
@pytest.mark.parametrize("name", BLOCKS)
def test_bias_over_forty_thousand_seeds(name, bits):
    x = torch.from_numpy(BLOCKS[name]).float()
    total, square, count = torch.zeros(BLOCK, dtype=torch.float64), torch.zeros(BLOCK, dtype=torch.float64), 40_000
    for seed in range(count):
        codec = Codec(bits, seed=seed)
        y = codec.decode(codec.encode(x)).double()
        total += y
        square += y.square()
    mean = total / count
    noise = (square / count - mean.square()).sum() / count
    bias = float(((mean - x).square().sum() - noise) / x.double().square().sum())
    assert bias < 1e-3


@pytest.mark.parametrize("bits", range(1, 9))
def test_distortion_on_a_quarter_of_a_billion_samples(bits):
    errors = []
    for seed in range(64):
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal(1 << 22, dtype=np.float32))
        codec = Codec(bits, 1024, "paper", 1, seed=seed, codebook="sphere")
        y = codec.decode(codec.encode(x))
        errors.append(float(((x - y).view(-1, 1024).square().sum(1) / x.view(-1, 1024).square().sum(1)).mean()))
    mean, error = np.mean(errors), np.std(errors, ddof=1) / math.sqrt(len(errors))
    assert abs(mean - distortion(bits, 1024)) < 4 * error and error < 1e-3 * mean

"""Shape statistics against SciPy, brute force and closed forms."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from tq.quant import stats


def gaussian(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n))


@pytest.mark.parametrize("kind", ("gaussian", "uniform", "two values", "ties"))
def test_ks_distance_is_scipys(kind):
    x = gaussian(999, 1)
    x = {
        "gaussian": x,
        "uniform": torch.linspace(-2, 2, 500, dtype=torch.float64),
        "two values": torch.sign(x),
        "ties": (x * 2).round(),
    }[kind]
    assert stats.ks_distance(x) == pytest.approx(scipy.stats.kstest(x.numpy(), "norm").statistic, abs=1e-12)


def test_gaussian_blocks():
    shape = stats.shape_of(gaussian(128 * 4000).float())
    assert shape.ks < 0.006 and abs(shape.excess_kurtosis) < 0.06 and shape.zeros == 0  # sphere: -6/(B+2)
    assert shape.excess_kurtosis == pytest.approx(-6 / 130, abs=0.01)
    assert shape.crest == pytest.approx(stats.gaussian_crest(128), rel=0.01)
    assert shape.effective == pytest.approx(1 / 3, rel=0.05)  # E[1/kurtosis] of 128 samples lies 3 % above 1/3


def test_spike_before_and_after_rotation():
    x = torch.zeros(128 * 50)
    x[5::128] = 1e-30  # also: far below the square root of fp32's smallest number
    before, once, twice = (stats.shape_of(x, rounds=r, seed=3) for r in (0, 1, 2))
    assert before.crest == pytest.approx(math.sqrt(128)) and before.effective == pytest.approx(1 / 128)
    assert once.excess_kurtosis == pytest.approx(-2, abs=1e-4) and once.crest == pytest.approx(1, abs=1e-4)  # +-1 only
    assert once.ks == pytest.approx(scipy.stats.norm.cdf(1) - 0.5, abs=0.05)
    assert abs(twice.excess_kurtosis) < 0.5 and twice.ks < once.ks / 2
    assert before.zeros == pytest.approx(127 / 128)


def test_rademacher_kurtosis_by_enumerating_all_signs():
    x = gaussian(10, 2)
    sums = torch.tensor([sum(s * v for s, v in zip(signs, x.tolist(), strict=True))
                         for signs in itertools.product((-1, 1), repeat=10)])  # fmt: skip
    exact = (sums**4).mean() / (sums**2).mean() ** 2 - 3
    assert stats.rademacher_excess_kurtosis(x) == pytest.approx(exact.item(), abs=1e-6)


def test_short_zero_and_empty():
    assert stats.unit_blocks(torch.zeros(300)).numel() == 0
    assert stats.unit_blocks(gaussian(40)).shape == (1, 40)
    assert stats.unit_blocks(gaussian(300)).shape == (2, 128)
    with pytest.raises(ValueError, match="all-zero"):
        stats.shape_of(torch.zeros(300))
    with pytest.raises(ValueError, match="empty"):
        stats.ks_distance(torch.zeros(0))

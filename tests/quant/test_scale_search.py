"""The search over scale multipliers: what is tried, what integers may judge, and what it gains."""

import math

import numpy as np
import pytest
import torch

from tq.quant.codebook import lloyd_max
from tq.quant.codec import Codec
from tq.quant.reference import _best_multipliers, _squared_sine
from tq.quant.scale_search import CELL, INTEGER_BITS, STEPS, TOP, multipliers, search


def of(count, bits, dim=None):
    levels, thresholds = (np.asarray(t, np.float32).tobytes() for t in lloyd_max(bits, dim))
    return search(count, bits, levels, thresholds)


@pytest.mark.parametrize("count", range(1, 65))
def test_multipliers_are_even_steps_that_hold_one(count):
    found = multipliers(count)
    assert len(found) == count and 1.0 in found and 0.75 <= found[0] <= found[-1] <= 1.25
    steps = np.diff(found)
    assert np.allclose(steps, steps[:1])


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", (None, 64, 1024))
def test_a_table_of_sixteen_cells_finds_every_cut(bits, dim):
    found, half = of(17, bits, dim), 1 << (bits - 1)
    if bits > INTEGER_BITS:
        assert found.cuts == found.levels == ()
        return
    assert len(found.levels) == half and found.levels[-1] == 63 and sorted(found.levels) == list(found.levels)
    for cuts in found.cuts:
        assert len(cuts) == half - 1 and sorted(cuts) == list(cuts) and all(0 <= cut <= TOP for cut in cuts)
        for a in range(TOP + 1):  # one comparison in the cell of a, after those below the cell
            first = a // CELL * CELL
            inside = [cut for cut in cuts if first <= cut < first + CELL - 1]
            assert len(inside) <= 1
            assert sum(cut < a for cut in cuts) == sum(cut < first for cut in cuts) + sum(cut < a for cut in inside)
    # sums of two products of a and q, and of four of q with itself, have to fit 16 bits
    assert 4 * TOP * max(found.levels) < 2**15 and 8 * max(found.levels) ** 2 < 2**15


def blocks(count, block, seed=0):
    z = torch.randn(count, block, generator=torch.Generator().manual_seed(seed))
    return z / z.norm(dim=1, keepdim=True) * math.sqrt(block)


@pytest.mark.parametrize("bits", (2, 3, 4))
@pytest.mark.parametrize("block", (64, 128, 1024))
@pytest.mark.parametrize("seed", (11, 12, 13))
def test_integers_choose_nearly_as_well_as_full_precision(bits, block, seed):
    """The rule: of the error without a search, integers lose at most a hundredth. Found on seed 0, held on others."""
    u, tried = blocks(2000, block, seed), of(17, bits)
    levels, thresholds = (torch.tensor(t, dtype=torch.float32) for t in lloyd_max(bits))

    def loss(multiplier):
        v = u * multiplier[:, None]
        return _squared_sine(v, levels[torch.bucketize(v, thresholds)])

    each = torch.stack([loss(torch.full((len(u),), m)) for m in tried.multipliers])
    plain, exact = each[tried.multipliers.index(1.0)].mean(), each.amin(0).mean()
    chosen = loss(_best_multipliers(u, tried, levels, thresholds)).mean()
    assert exact <= chosen < plain
    assert chosen - exact < 0.01 * plain


@pytest.mark.parametrize("count,gain", ((3, 0.095), (5, 0.12), (13, 0.14), (17, 0.14)))
@pytest.mark.parametrize("impl", ("reference", "cpu"))
def test_error_falls_by_what_the_documentation_says(count, gain, impl):
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    plain, searched = (
        (x - codec.decode(codec.encode(x, impl=impl))).square().sum()
        for codec in (Codec(4, 128, "mse"), Codec(4, 128, "mse", search=count))
    )
    assert 1 - searched / plain > gain


@pytest.mark.parametrize("impl", ("reference", "cpu"))
def test_blocks_without_a_direction_stay_what_they_are(impl):
    x = torch.randn(6, 128)
    x[1], x[2, 5], x[3, 7] = 0.0, math.inf, math.nan
    x[4], x[5] = x[4].clamp(-3, 3) * 1e38, x[5] * 1e-38
    codec = Codec(4, 128, "mse", search=13, nonfinite="propagate")
    y = codec.decode(codec.encode(x, impl=impl))
    assert (y[1] == 0).all() and y[2].isnan().all() and y[3].isnan().all()
    for row in (0, 4, 5):
        scale = x[row].abs().amax()
        assert ((x[row] - y[row]) / scale).square().sum() < 0.02 * (x[row] / scale).square().sum()


def test_kernels_judge_as_it_is_said_here():
    """They import nothing of the codec, so the numbers stand there too."""
    from tq.kernels import gpu, simd

    assert (simd.INTEGER_BITS, simd.STEPS) == (INTEGER_BITS, STEPS)
    assert (gpu._INTEGER_BITS.value, gpu._STEPS.value) == (INTEGER_BITS, STEPS)

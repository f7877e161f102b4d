"""Rival formats: published level tables, bits, exactness where they promise it."""

import numpy as np
import pytest
import torch

from tq import Codec
from tq.quant import formats

# QLoRA, appendix E: the published NF4 values
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
ALL = [
    formats.nf4(64), formats.nf4(128), formats.nf4_double_quantized(), formats.fp4(64), formats.mxfp4(),
    formats.nvfp4(), formats.fp8("e4m3"), formats.fp8("e5m2"), formats.mxfp8(), formats.integer(8, 128),
    formats.integer(4, 128), formats.integer(4, None), formats.affine(4, 128), formats.of_codec(Codec(), "tq"),
]  # fmt: skip


def gaussian(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n)).float()


def test_nf4_levels_are_the_published_ones():
    assert formats.nf4_levels().tolist() == pytest.approx(NF4, abs=5e-7)


def test_stored_bits():
    by_name = {f.name: f.bits_per_element for f in ALL}
    assert by_name["NF4, B=64"] == 4.5 and by_name["MXFP4, B=32"] == 4.25 and by_name["NVFP4, B=16"] == 4.5
    assert by_name["FP8 E4M3, B=128"] == 8.25 and by_name["MXFP8 E4M3, B=32"] == 8.25 and by_name["tq"] == 4.25
    assert by_name["NF4 + double quant, B=64"] == pytest.approx(4.127, abs=0.0005)


# NMSE of a 4-bit absmax format on Gaussian data, from an independent double loop over the definition below
@pytest.mark.parametrize("fmt,levels,block", [(formats.nf4(64), NF4, 64), (formats.fp4(64), None, 64)])
def test_against_brute_force(fmt, levels, block):
    if levels is None:
        levels = sorted({s * v / 6 for s in (-1, 1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)})
    x = gaussian(block * 8)
    expected = []
    for row in x.view(-1, block).tolist():
        top = max(map(abs, row))
        expected += [top * min(levels, key=lambda c, v=v, t=top: abs(v / t - c)) for v in row]
    assert torch.allclose(fmt.roundtrip(x), torch.tensor(expected), atol=2e-6)


def test_nf4_distortion_on_gaussians():
    x = gaussian(1 << 20)
    assert formats.nmse(x, formats.nf4(64).roundtrip(x)) == pytest.approx(0.0085, abs=2e-4)


@pytest.mark.parametrize("fmt", ALL, ids=lambda f: f.name)
def test_laws(fmt):
    x = gaussian(1000).view(10, 100)
    y = fmt.roundtrip(x)
    assert y.shape == x.shape and y.dtype == torch.float32
    mantissa_limit = (
        2.0**-6 if "E5M2" in fmt.name else 2.0**-8 if fmt.family in ("fp8", "mxfp8") else 0.0
    )  # relative precision
    assert (
        formats.nmse(x, y) < (20 if "per tensor" in fmt.name else 6) * 4.0**-fmt.bits_per_element + mantissa_limit / 3
    )
    assert torch.equal(fmt.roundtrip(torch.zeros(300)), torch.zeros(300))
    if "NVFP4" not in fmt.name:  # its fp32 scale of the tensor is free, so the power of two may move codes between ties
        assert torch.allclose(fmt.roundtrip(x * 2.0**-20) * 2.0**20, y, rtol=1e-5, atol=1e-6)


ABSMAX = [
    f for f in ALL if f.family in ("nf4", "fp4", "nvfp4", "fp8", "mxfp8", "int8", "int4") and "double" not in f.name
]


@pytest.mark.parametrize("fmt", ABSMAX, ids=lambda f: f.name)
def test_absmax_formats_keep_a_lone_spike(fmt):
    """What a rotation gives up: with all else zero, an absmax block is exact (to its scale's own rounding)."""
    x = torch.zeros(512)
    x[5] = 3.7
    assert formats.nmse(x, fmt.roundtrip(x)) < (5e-3 if fmt.name.startswith(("NVFP4", "MX")) else 1e-9)


def test_mxfp4_values_by_hand():
    x = torch.zeros(32)
    x[:6] = torch.tensor([6.0, 5.1, 4.9, 0.2, -3.4, 1.25])  # amax 6: scale 2**(2 - 2) = 1; the tie 5.0 is not touched
    y = formats.mxfp4().roundtrip(x)
    assert y[:5].tolist() == [6.0, 6.0, 4.0, 0.0, -3.0]
    assert y[5].item() in (1.0, 1.5)
    assert formats.mxfp4().roundtrip(torch.full((32,), 7.9)).tolist() == [6.0] * 32  # saturates: amax below 8


def test_nmse_of_zeros():
    assert formats.nmse(torch.zeros(3), torch.zeros(3)) == 0.0
    assert formats.nmse(torch.zeros(3), torch.ones(3)) == float("inf")

"""Laws of the logarithmic codec: unbiased, never to zero, exact zeros, bounded error, no time without effect."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from tq.quant.logscale import RANGE, LogCodec


def moments(n=128 * 50, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(spread * torch.randn(n, generator=generator)) * 1e-8


@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("n", (1, 127, 128, 129, 6400))
def test_shapes_bytes_and_error(bits, n):
    codec, v = LogCodec(bits), moments(n, spread=2.0)
    codes, ranges = codec.encode(v)
    blocks = -(-n // 128)
    assert codes.shape == (blocks, 128 * bits // 8) and codes.dtype == torch.uint8
    assert ranges.shape == (blocks, 2) and ranges.dtype == torch.int16
    assert 8 * (codes.nbytes + ranges.nbytes) / (128 * blocks) == codec.bits_per_element
    decoded = codec.decode(codes, ranges, n)
    width = ((ranges[:, 1] - ranges[:, 0]).int() << 16) / ((1 << bits) - 2)
    apart = (decoded.view(torch.int32) - v.view(torch.int32)).abs()
    assert (apart <= width.repeat_interleave(128)[:n] + 1).all()


@pytest.mark.parametrize("bits", (4, 8))
def test_the_mean_over_time_is_right_and_small_changes_are_not_lost(bits):
    codec, v = LogCodec(bits), moments(spread=1.0)
    decoded = torch.stack([codec.decode(*codec.encode(v, step), v.numel()) for step in range(400)])
    assert torch.allclose(decoded.mean(0), v, rtol=0.005 if bits == 8 else 0.06)
    # a moving average towards 2 v, a thousandth a step, each step through the codec
    kept = v.clone()
    for step in range(1500):
        kept = codec.decode(*codec.encode(0.999 * kept + 0.001 * 2 * v, step), v.numel())
    expected = 2 - 0.999**1500
    assert (kept / v).mean().item() == pytest.approx(expected, rel=0.03)


def test_zeros_stay_and_nothing_else_becomes_zero():
    codec = LogCodec(4)
    v = torch.zeros(3, 128)
    v[0, ::2] = moments(64)
    v[1, 5], v[1, 6] = 1.0, 2.0**-100  # far beyond the range: rises to its end
    decoded = codec.decode(*codec.encode(v.flatten()), v.numel()).view(3, 128)
    assert torch.equal(decoded == 0, v == 0)
    assert decoded[1, 6] == pytest.approx(2.0**-RANGE, rel=0.05) and decoded[1, 5] == pytest.approx(1.0, rel=0.05)


def test_a_constant_block_is_kept_to_its_own_value():
    codec, v = LogCodec(8), torch.full((128,), 3.7e-11)
    assert torch.allclose(codec.decode(*codec.encode(v), 128), v, rtol=0.05)


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_what_is_not_finite_makes_its_block_nan(bad):
    codec, v = LogCodec(8), moments(384)
    v[200] = bad
    decoded = codec.decode(*codec.encode(v), 384)
    assert decoded[128:256].isnan().all() and decoded[:128].isfinite().all() and decoded[256:].isfinite().all()


def test_it_repeats_and_draws_nothing():
    codec, v = LogCodec(4), moments()
    state = torch.get_rng_state()
    first, second = codec.encode(v, 7), codec.encode(v, 7)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], codec.encode(v, 8)[0])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("settings", "message"), [({"bits": 3}, "bits"), ({"block": 12}, "block"), ({"block": 0}, "block")]
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LogCodec(**settings)


@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("n", (1, 130, 128 * 17 + 5, 200_000))
def test_the_kernel_gives_the_bits_of_the_reference(bits, n):
    """Whatever the blocks hold, and on any number of threads."""
    codec, v = LogCodec(bits), moments(n)
    v[::7] = 0.0
    v[n // 2] = 2.0**-149
    v[-1] = 3e38
    if n > 1000:
        v[300], v[500] = math.nan, math.inf
        v[640:768], v[768:896] = 0.0, 5.0
        v[900] = -1.0
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            code = codec.encode(v, 3)
            found.append((*code, codec.decode(*code, n)))
    finally:
        torch.set_num_threads(threads)
    code = codec.encode(v, 3, impl="reference")
    assert n < 1000 or "tq.kernels.logscale" in sys.modules
    for kernel in found:
        bad = code[1][:, 1] == 0x7FC0  # whose codes mean nothing
        assert torch.equal(kernel[0][~bad], code[0][~bad]) and torch.equal(kernel[1], code[1])
        assert torch.equal(kernel[2].nan_to_num(-1.0), codec.decode(*code, n, impl="reference").nan_to_num(-1.0))

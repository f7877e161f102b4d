"""Break-even: the algebra against itself, and the laws that any model of compression has to keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tq.economics import breakeven as be
from tq.systems import collectives

shares = st.floats(0, 0.99)
ratios = st.floats(1, 100)
overheads = st.floats(1, 10)
steps = st.builds(be.Step, st.floats(1e-3, 1e3), st.floats(1e3, 1e12), st.integers(1, 4096), st.sampled_from([16, 32]))
links = st.floats(1e-2, 1e5)


def test_the_ratio_follows_from_bits_and_block() -> None:
    assert be.ratio() == pytest.approx(32 / (4 + 32 / 128)) and round(float(be.ratio()), 2) == 7.53
    assert round(float(be.ratio(base_bits=16)), 2) == 3.76
    assert be.ratio(4, 128, 16) > be.ratio(4, 128, 32) > be.ratio(4, 64, 32)
    with pytest.raises(ValueError, match="nothing is compressed"):
        be.ratio(8, 2, 32, 16)


@given(shares, ratios)
def test_at_the_breakeven_overhead_nothing_is_saved(f: float, r: float) -> None:
    k = float(be.breakeven_overhead(f, r))
    assert k >= 1 - 1e-12
    assert be.saving(f, r, max(k, 1.0)) == pytest.approx(0, abs=1e-9)


@given(st.floats(0, 0.9), st.floats(1.01, 100), overheads)
def test_share_for_a_saving_gives_that_saving(wanted: float, r: float, k: float) -> None:
    f = float(be.share_for(wanted, r, k))
    assume(0 <= f < 1)
    assert be.saving(f, r, k) == pytest.approx(wanted, abs=1e-9)
    assert be.saving(be.breakeven_share(k, r), r, k) == pytest.approx(0, abs=1e-9)


@given(shares, ratios, ratios, overheads, overheads)
def test_more_compression_helps_and_more_overhead_hurts(
    f: float, r: float, more: float, k: float, other: float
) -> None:
    assert be.saving(f, max(r, more), k) >= be.saving(f, min(r, more), k) - 1e-12
    assert be.saving(f, r, min(k, other)) >= be.saving(f, r, max(k, other)) - 1e-12
    assert be.saving(f, r, k) <= f * (1 - 1 / r) + 1e-12
    assert be.speedup(f, r, k) == pytest.approx(1 / (1 - be.saving(f, r, k)))


@given(steps, st.floats(1, 100), st.floats(0, 10), st.floats(0, 1))
def test_compression_never_helps_on_an_infinitely_fast_link(
    step: be.Step, r: float, codec_s: float, over: float
) -> None:
    assert be.Step.saving(step, np.inf, r, codec_s, over) <= 0
    assert step.share(np.inf) == 0


@given(steps, links, st.floats(1, 100), st.floats(0, 10), st.floats(0, 1))
def test_a_step_is_never_shorter_than_its_compute(
    step: be.Step, link: float, r: float, codec: float, over: float
) -> None:
    coded, plain = step.seconds(link, r, codec, over), step.seconds(link, 1.0, 0.0, over)
    assert coded >= step.compute_s + codec and plain >= step.compute_s
    assert step.seconds(2 * link, r, codec, over) <= coded
    assert np.isfinite(coded) and np.isfinite(plain)


@given(steps, st.floats(1.1, 100), st.floats(1e-6, 10), st.floats(0, 1))
def test_the_breakeven_link_separates(step: be.Step, r: float, codec_s: float, over: float) -> None:
    rate = float(step.breakeven_gbit(r, codec_s, over))
    if step.replicas == 1:
        assert rate == 0
        return
    scale = float(step.seconds(rate, 1.0, 0.0, over))
    assert step.saving(rate, r, codec_s, over) == pytest.approx(0, abs=1e-9)
    assert step.saving(rate * 1.5, r, codec_s, over) <= 1e-12
    assert step.saving(rate / 1.5, r, codec_s, over) >= -1e-12
    assert scale > 0


def test_a_codec_without_cost_pays_on_every_link_that_is_seen() -> None:
    step = be.Step(1.0, 1e9, 8)
    assert step.breakeven_gbit(4, 0.0) == np.inf
    hidden = float(step.breakeven_gbit(4, 0.0, 0.5))
    assert step.saving(hidden * 1.01, 4, 0.0, 0.5) == 0 and step.saving(hidden / 1.01, 4, 0.0, 0.5) > 0


@given(shares, links, links)
def test_a_share_goes_from_link_to_link_and_back(f: float, link: float, reference: float) -> None:
    there = be.share_at_link(f, link, reference)
    assume(there < 1)
    assert be.share_at_link(there, reference, link) == pytest.approx(f, rel=1e-6, abs=1e-12)


@given(steps, links, links)
def test_the_share_of_a_step_follows_the_link(step: be.Step, link: float, reference: float) -> None:
    f = float(step.share(reference))
    assume(f < 1 and step.share(link) < 1)
    assert be.share_at_link(f, link, reference) == pytest.approx(float(step.share(link)), rel=1e-6)


def test_wire_bytes_are_those_of_the_ring() -> None:
    step = be.Step(1.0, 1e9, 32, 16)
    assert step.wire_bytes == pytest.approx(collectives.ring_bytes(1e9, 32, 2.0))
    assert step.exchange_s(100) == pytest.approx(collectives.ring_s(1e9, 32, collectives.Link.mbit(1e5), 2.0))


@given(st.integers(1, 4096), st.integers(1, 8), st.floats(1e8, 1e12), st.floats(1e5, 1e8), st.floats(10, 1000))
def test_a_step_of_a_model_does_its_flops(dp: int, each: int, parameters: float, tokens: float, rate: float) -> None:
    step = be.Step.of(parameters, tokens, dp * each, each, rate)
    assert step.compute_s * dp * each * rate * 1e12 == pytest.approx(6 * parameters * tokens)
    assert step.replicas == dp and step.numbers == pytest.approx(parameters / each)


def test_surface_agrees_with_the_points_and_knows_its_baseline() -> None:
    f, link, k = [0.05, 0.3], [400.0, 100.0, 25.0], [1.0, 1.1, 2.0]
    bf16, fp32 = be.surface(f, link, k), be.surface(f, link, k, base_bits=32)
    assert bf16.shape == fp32.shape == (2, 3, 3)
    for i, share in enumerate(f):
        for j, rate in enumerate(link):
            at = float(be.share_at_link(share, rate))
            assert bf16[i, j].tolist() == pytest.approx([float(be.saving(at, be.ratio(base_bits=16), x)) for x in k])
    assert np.all(fp32[..., 0] > bf16[..., 0])  # twice the traffic to begin with, the same codes
    assert np.all(np.diff(bf16, axis=2) < 0) and np.all(np.diff(bf16, axis=1) > 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: be.saving(1.0, 8), "f must be between 0 and 1, without that end, got 1.0"),
        (lambda: be.saving(-0.1, 8), "f must be"),
        (lambda: be.saving([0.1, float("nan")], 8), "f must be.*nan"),
        (lambda: be.saving(0.1, 0.5), "r must be at least 1"),
        (lambda: be.saving(0.1, 8, 0.9), "k must be at least 1"),
        (lambda: be.saving("0.1", 8), "f must be a number"),
        (lambda: be.ratio(bits=0), "bits must be positive"),
        (lambda: be.ratio(block=0), "block must be at least 1"),
        (lambda: be.Step(-1, 1, 1), "compute_s must be"),
        (lambda: be.Step(1, 1, 0.5), "replicas must be at least 1"),
        (lambda: be.Step.of(1e9, 1e6, 4, 8, 400), "gpus_per_replica must be at most"),
        (lambda: be.Step(1, 1, 2).exchange_s(0), "link_gbit must be positive"),
        (lambda: be.Step(1, 1, 2).seconds(1, 1, 0, 1.5), "overlap must be between 0 and 1"),
        (lambda: be.share_for(0.1, 1, 1), "save nothing at any share"),
        (lambda: be.surface([0.2], [0.0], [1.0]), "link_gbit must be positive"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()  # type: ignore[operator]

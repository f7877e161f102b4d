"""The reference job and its closed form: the laws that a reader would expect, its interval, its waterfall."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.economics import breakeven, prices, scenarios, whitepaper
from tq.economics.savings import (
    FIELDS,
    SAMPLES,
    UNCERTAIN,
    exactly,
    job,
    reference,
    sampled,
    savings,
    times,
    waterfall,
    widened,
)

FREE = {"codec_g": 1e6, "overlap": 0.0, "reach": 1.0}


def value(field: object) -> st.SearchStrategy[float]:
    if field.choices:  # type: ignore[attr-defined]
        return st.sampled_from([each for each, _ in field.choices])  # type: ignore[attr-defined]
    if field.whole:  # type: ignore[attr-defined]
        return st.integers(int(field.low), int(min(field.high, 1e6))).map(float)  # type: ignore[attr-defined]
    return st.floats(field.low, field.high)  # type: ignore[attr-defined]


CASES = st.fixed_dictionaries({field.name: value(field) for field in FIELDS}).map(widened)


@given(CASES)
def test_results_are_finite_and_ordered_for_every_case_that_is_accepted(case: dict[str, float]) -> None:
    try:
        found = savings(case)
    except ValueError as error:
        assert any(word in str(error) for word in ("gpus_per_replica", "base_bits"))
        return
    assert all(each is None or math.isfinite(each) for each in found.values())
    n = {name: each for name, each in found.items() if each is not None}
    assert n["plain_s"] > 0 and n["coded_s"] > 0 and 0 <= n["chance"] <= 1 and 0 <= n["share"] <= 1
    assert n["saving_low"] <= n["saving_high"] and n["saved_usd_low"] <= n["saved_usd_high"]
    assert n["coded_exchange_s"] <= n["exchange_s"]


@given(st.sampled_from((16.0, 32.0)), st.sampled_from((0.0, 1.0)), st.floats(1, 1e4))
def test_without_overlap_it_is_amdahl_s_law(bits: float, zero: float, link: float) -> None:
    case = exactly(reference(**FREE, base_bits=bits, zero=zero, link_gbit=link))
    found = savings(case)
    sent, coded = (bits + 16, 4.25 + 16) if zero else (2 * bits, 2 * 4.25)
    k = 1 + found["codec_s"] / found["compute_s"]  # type: ignore[operator]
    expected = breakeven.saving(found["share"], sent / coded, k)  # type: ignore[arg-type]
    assert found["saving"] == pytest.approx(float(expected), abs=1e-12)


@given(st.floats(1e-3, 1e6), st.floats(1, 1e4), st.floats(0, 1), st.sampled_from((0.0, 1.0)))
def test_a_faster_codec_never_saves_less_and_an_endless_link_saves_nothing(
    speed: float, link: float, overlap: float, zero: float
) -> None:
    at = {"overlap": overlap, "zero": zero, "link_gbit": link}
    slow, fast = (float(times(reference(**at, codec_g=each)).saving) for each in (speed / 2 + 5e-4, speed))
    assert fast >= slow
    assert float(times(reference(**{**at, "link_gbit": 1e6}, codec_g=speed)).saving) < 1e-3


@pytest.mark.parametrize("overlap", (0.0, 0.2, 0.5))
@pytest.mark.parametrize("zero", (0.0, 1.0))
def test_break_evens_separate_yes_from_no(overlap: float, zero: float) -> None:
    case = reference(overlap=overlap, zero=zero, link_gbit=25)
    found = savings(case)
    link, speed = found["breakeven_gbit"], found["breakeven_codec_g"]
    assert link is not None and speed is not None
    for name, at in (("link_gbit", link), ("codec_g", speed)):
        below, above = (float(times(widened({**case, name: at * f})).saving) for f in (0.99, 1.01))
        assert below * above < 0, name
    if overlap:
        assert savings({**case, "link_gbit": 1e6})["breakeven_codec_g"] is None


def test_gradients_and_weights_cannot_use_each_other_s_cover() -> None:
    """Gradients that are hidden whole leave cover that weights cannot take, and the other way round."""
    whole = times(reference(overlap=0.0))
    compute, weights = float(whole.compute), float(whole.exchange) / 2  # bf16 both ways
    for overlap in (0.0, 0.03, 0.1, 1.0):
        found = times(reference(overlap=overlap))
        for gradients, waits in ((weights, found.exposed), (weights * 4.25 / 16, found.coded_exposed)):
            cover = overlap * compute
            expected = max(gradients - 2 / 3 * cover, 0) + max(weights - cover / 3, 0)
            assert float(waits) == pytest.approx(expected, abs=1e-12)
    without = times(reference(overlap=0.03, zero=0))
    assert float(without.exposed) == pytest.approx(2 * weights - 0.02 * compute)


def test_a_single_replica_sends_nothing_and_codes_nothing() -> None:
    found = savings(reference(gpus=8))
    assert found["exchange_s"] == found["codec_s"] == found["saving"] == 0.0 and found["pays"] == -1.0


def test_draws_are_even_within_each_range_and_the_same_for_two_cases() -> None:
    case = reference()
    compute = sampled(case).compute * case["tflops"] / times(case).compute  # TFLOP/s / drawn TFLOP/s * expected
    drawn = case["tflops"] ** 2 / compute
    assert compute.shape == (SAMPLES,) and np.mean(drawn < case["tflops"]) == pytest.approx(0.5, abs=0.01)
    assert drawn.min() >= case["tflops_low"] - 1e-6 and drawn.max() <= case["tflops_high"] + 1e-6
    assert np.quantile(drawn, (0.25, 0.75)) == pytest.approx((450, 525), rel=0.01)
    speed = 2 * 8.75 / sampled(case).codec
    quarters = np.sqrt((case["codec_g"] * case["codec_g_low"], case["codec_g"] * case["codec_g_high"]))
    assert np.quantile(speed, (0.25, 0.5, 0.75)) == pytest.approx((quarters[0], case["codec_g"], quarters[1]), rel=0.05)
    slower = sampled(reference(link_gbit=100))
    assert np.array_equal(slower.compute, sampled(case).compute) and (slower.exchange > sampled(case).exchange).all()


def test_without_ranges_every_draw_is_the_case() -> None:
    found = savings(exactly(reference(link_gbit=50)))
    assert found["saving_low"] == pytest.approx(found["saving"]) == found["saving_high"]
    assert found["chance"] == 1.0 and found["pays"] == 1.0
    assert savings(exactly(reference(overlap=0.9)))["pays"] == -1.0


def test_ranges_grow_to_hold_a_changed_value() -> None:
    assert reference(overlap=0.9)["overlap_high"] == 0.9 and reference(codec_g=0.5)["codec_g_low"] == 0.5
    with pytest.raises(ValueError, match="unknown: overhead"):
        reference(overhead=1.1)


def test_the_reference_job_is_that_of_the_step_model_and_of_the_price_list() -> None:
    known = job()
    case, fields = scenarios.case("70b"), scenarios.fields("70b")
    assert case.layout.gpus == known["gpus"].value and case.layout.tp == known["gpus_per_replica"].value
    assert case.tokens == known["tokens_b"].value * 1e9 and case.layout.zero == known["zero"].value
    assert fields["overlap"] == known["overlap"].value
    assert fields["tflops"] == pytest.approx(known["tflops"].value, rel=0.02)
    assert known["tflops"].low <= fields["tflops_low"] and fields["tflops_high"] <= known["tflops"].high
    spread = prices.load().spread("h100-80gb", as_of=prices.load().newest)
    assert known["usd_per_gpu_hour"].value == spread.mid  # else the price list is newer: change the job with it


def test_the_waterfall_ends_at_the_reference_job() -> None:
    causes = waterfall(whitepaper.SAVINGS, whitepaper.SHARES)
    assert causes[0][1] == sum(whitepaper.SAVINGS) / 2 and causes[-1][1] == savings(reference())["saving"]
    assert len({cause for cause, _ in causes}) == len(causes) == 9
    assert causes[1][1] == pytest.approx(sum(whitepaper.savings_at_claimed_shares()) / 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"overlap": 1.5}, "overlap must be a number from 0 to 1, got 1.5"),
        ({"gpus": 2.5}, "gpus must be an int from 1"),
        ({"gpus": -4.0}, "gpus must be"),
        ({"base_bits": 8.0}, "base_bits must be one of 16, 32"),
        ({"tflops": float("nan")}, "tflops must be"),
        ({"tflops": "fast"}, "tflops must be"),
        ({"gpus_per_replica": 512.0}, "gpus_per_replica must be at most gpus=256"),
        ({"base_bits": 16.0, "bits": 8.0, "block": 2.0}, "bits must leave less than base_bits=16"),
        ({"overlap_high": 0.01}, "overlap_low must be at most overlap=0.03125 and overlap_high at least that"),
        ({"colour": 1.0}, "unknown: colour"),
    ],
)
def test_bad_input_is_named(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        savings({**reference(), **change})


def test_every_uncertain_input_moves_the_interval() -> None:
    """None is carried along without an effect."""
    whole = savings(reference(link_gbit=100))
    for name in UNCERTAIN:
        case = reference(link_gbit=100)
        fixed = savings({**case, f"{name}_low": case[name], f"{name}_high": case[name]})
        assert (fixed["saving_low"], fixed["saving_high"]) != (whole["saving_low"], whole["saving_high"]), name

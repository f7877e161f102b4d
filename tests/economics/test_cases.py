"""The standard runs: they fit and multiply out; their closed form obeys the laws of the break-even algebra."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.economics import breakeven, cases
from tq.economics.cited import cited
from tq.economics.uncertainty import monte_carlo, sample
from tq.systems import hardware

FIXED = {"tokens_per_step": 4e6, "tflops": 400.0, "reach": 1.0, "overlap": 0.0}


@pytest.mark.parametrize("name", list(cases.CASES))
def test_each_case_fits_its_gpu_and_follows_its_link(name: str) -> None:
    found = cases.case(name)
    fast, slow = found.predict(), found.predict("eth-25g")
    assert fast.memory_gib < hardware.gpu(found.gpu).memory_bytes / 2**30
    assert slow.iteration_s > fast.iteration_s
    assert found.tokens > fast.tokens_per_iteration


def test_an_unknown_case_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'13b': accepted are 7b, 70b"):
        cases.case("13b")


def test_step_saving_is_the_algebra_of_shares() -> None:
    """Without overlap and with a codec that takes no time it is Amdahl's law at the share of that link."""
    link = np.array([25.0, 100.0, 400.0])
    for bits in (16, 32):
        share = breakeven.Step.of(70e9, 4e6, 256, 8, 400, bits).share(link)
        expected = breakeven.saving(share, breakeven.ratio(base_bits=bits))
        found = cases.step_saving(**FIXED, elements_per_s=np.inf, link_gbit=link, base_bits=bits)
        assert found == pytest.approx(expected)


@given(st.floats(1e8, 1e13), st.floats(1.0, 1e4), st.sampled_from([16, 32]))
def test_a_faster_codec_saves_more_and_an_endless_link_nothing(speed: float, link: float, bits: float) -> None:
    at = {**FIXED, "base_bits": bits}
    slow = cases.step_saving(**at, elements_per_s=speed, link_gbit=link)
    fast = cases.step_saving(**at, elements_per_s=2 * speed, link_gbit=link)
    assert fast > slow
    assert cases.step_saving(**at, elements_per_s=speed, link_gbit=np.inf) < 0


def test_overhead_counts_every_pass() -> None:
    step = breakeven.Step(compute_s=2.0, numbers=1e9, replicas=4)
    assert cases.codec_s(1e9, 4, 1e9) == pytest.approx(3.25)
    assert cases.overhead(step, 1e9) == pytest.approx(1 + 3.25 / 2)
    assert cases.overhead(step, np.inf) == 1


def test_inputs_are_those_of_the_function_and_their_speed_is_the_models() -> None:
    inputs = cases.saving_inputs("70b")
    found = monte_carlo(lambda **x: cases.step_saving(**x, link_gbit=100.0), inputs, 500)
    assert found.values.shape == (500,)
    speed = sample(inputs, 4001)["tflops"]
    prediction = cases.case("70b").predict()
    assert np.median(speed) > prediction.model_tflops_per_gpu * 0.9  # the rate without the exchange, by 6 N D
    low, high = np.quantile(speed, [0.1, 0.9])
    assert high / low == pytest.approx(prediction.interval[1] / prediction.interval[0], rel=0.01)


def test_claimed_saving_knows_three_ratios() -> None:
    claimed, fp32, bf16 = (cases.claimed_saving(0.55, 1.0, base_bits=b) for b in (None, 32, 16))
    assert claimed == pytest.approx(0.55 * 7 / 8)
    assert claimed > fp32 > bf16 > 0.4


def test_a_cited_figure_is_read_with_its_range() -> None:
    one, two = cited("ib-bom"), cited("interconnect-share-total")
    assert one.low == one.high > 1000 and one.unit == "USD/GPU"
    assert two.low < two.high
    with pytest.raises(ValueError, match="no such row"):
        cited("nothing")
    with pytest.raises(ValueError, match="holds no figure"):
        cited("ethernet-per-gpu")

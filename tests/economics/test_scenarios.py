"""The standard runs: they fit and multiply out; their closed form obeys the laws of the break-even algebra, and so does
one case on two networks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.economics import breakeven, savings, scenarios
from tq.economics.citations import cited
from tq.economics.scenarios import FORMS, case, payback_years, relative, step_s
from tq.systems import Bits, Compression, hardware

SLOWER = ("eth-400g", "eth-200g", "eth-100g", "eth-40g", "eth-25g", "eth-10g")


@pytest.mark.parametrize("name", list(scenarios.CASES))
def test_each_case_fits_its_gpu_and_follows_its_link(name: str) -> None:
    found = scenarios.case(name)
    fast, slow = found.predict(), found.predict("eth-25g")
    assert fast.memory_gib < hardware.gpu(found.gpu).memory_bytes / 2**30
    assert slow.iteration_s > fast.iteration_s
    assert found.tokens > fast.tokens_per_iteration


def test_an_unknown_case_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'13b': accepted are 7b, 70b"):
        scenarios.case("13b")


@pytest.mark.parametrize("name", ["7b", "70b", "175b", "405b"])
@pytest.mark.parametrize(("network", "gbit"), [("ib-ndr", 400.0), ("eth-100g", 100.0), ("eth-25g", 25.0)])
def test_the_closed_form_is_the_step_model_where_data_parallelism_is_what_crosses(
    name: str, network: str, gbit: float
) -> None:
    """To 3 %; with a pipeline, whose own traffic grows on a slow link, to 10 %. Of the 70B job without codes to .1 %:
    with codes Megatron-Core leaves a part of the traffic exposed however little there is."""
    near = 0.1 if case(name).layout.pp > 1 else 0.03
    case_, fields = scenarios.case(name), scenarios.fields(name)
    found = savings.savings(savings.reference(**fields, link_gbit=gbit, base_bits=32.0))
    codec = Compression(gradients=Bits(4), elements_per_s=scenarios.CODEC_PER_S)
    plain, coded = (float(case_.predict(network, compression=each).iteration_s) for each in (None, codec))
    assert found["plain_s"] == pytest.approx(plain, rel=near)
    assert found["coded_s"] == pytest.approx(coded, rel=near)
    if name == "70b":
        assert found["plain_s"] == pytest.approx(plain, rel=1e-3)


def test_a_case_with_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="has experts"):
        scenarios.fields("8x22b-ep8")


def test_overhead_counts_every_pass() -> None:
    step = breakeven.Step(compute_s=2.0, numbers=1e9, replicas=4)
    assert scenarios.codec_s(step, 1e9) == pytest.approx(3.25)
    assert scenarios.codec_s(breakeven.Step(2.0, 1e9, 4, weight_bits=16), 1e9) == pytest.approx(2.0)
    assert scenarios.overhead(step, 1e9) == pytest.approx(1 + 3.25 / 2)
    assert scenarios.overhead(step, np.inf) == 1


def test_claimed_saving_knows_three_ratios() -> None:
    claimed, fp32, bf16 = (scenarios.claimed_saving(0.55, 1.0, base_bits=b) for b in (None, 32, 16))
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


@pytest.mark.parametrize("form", FORMS)
def test_a_slower_link_never_makes_a_step_shorter(form: str) -> None:
    times = [float(step_s(case("70b"), tier, form)) for tier in SLOWER]
    assert times == sorted(times)


@pytest.mark.parametrize("tier", ("eth-25g", "eth-10g"))
def test_on_a_slow_link_more_coding_is_a_shorter_step(tier: str) -> None:
    plain, gradients, both = (float(step_s(case("70b"), tier, form)) for form in FORMS)
    assert both < gradients < plain


def test_on_a_link_that_takes_no_time_coding_only_costs() -> None:
    for form in FORMS[1:]:
        fast = {"link": float("inf")}
        assert step_s(case("70b"), "eth-400g", form, **fast) > step_s(case("70b"), "eth-400g", "plain", **fast)


def test_a_case_beside_itself_takes_its_own_time() -> None:
    found = relative(case("7b"), "eth-100g", "plain", "eth-100g", samples=200)
    assert (found.low, found.mid, found.high) == pytest.approx((1, 1, 1))
    slower = relative(case("7b"), "eth-25g", "plain", "eth-100g", samples=200)
    assert 1 < slower.low < slower.mid < slower.high


def test_the_saving_is_bounded_by_the_bytes() -> None:
    # one way of two in codes leaves more than a third of the exchange, both ways more than a sixth
    for form, left in (("gradients", (4.25 / 8 + 2) / 6), ("both", 2 * 4.25 / 8 / 6)):
        assert relative(case("70b"), "eth-10g", form, "eth-10g", samples=200).low > left


@settings(max_examples=50, deadline=None)
@given(st.floats(1.001, 100), st.floats(0.1, 100))
def test_a_slower_step_and_a_dearer_hour_pay_sooner(slower: float, usd: float) -> None:
    years = payback_years(4000, slower, usd)
    assert years is not None and years > 0
    assert (payback_years(4000, slower * 1.1, usd) or 0) < years
    assert payback_years(4000, slower, 2 * usd) == pytest.approx(years / 2)
    assert years == pytest.approx(4000 / (8760 * usd * (1 - 1 / slower)))


def test_what_is_no_slower_never_pays_and_bad_input_raises() -> None:
    assert payback_years(4000, 1.0, 2.0) is None and payback_years(4000, 0.9, 2.0) is None
    with pytest.raises(ValueError, match="fabric_usd must be positive, got -1"):
        payback_years(-1, 1.2, 2.0)
    with pytest.raises(ValueError, match="form must be one of"):
        step_s(case("7b"), "eth-100g", "coded")

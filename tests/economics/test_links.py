"""One case on two networks: laws that hold whatever the constants are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.economics.cases import case
from tq.economics.links import FORMS, payback_years, relative, step_s

SLOWER = ("eth-400g", "eth-200g", "eth-100g", "eth-40g", "eth-25g", "eth-10g")


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

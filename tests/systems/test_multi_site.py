"""Sites with a slow link: the inverse of the model, its limits, its laws."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.systems.collectives import Link, ring_s
from tq.systems.multi_site import Sites

cases = st.builds(
    Sites, compute_s=st.floats(0.1, 100), numbers=st.floats(1e6, 1e12), sites=st.integers(2, 64),
    bits=st.sampled_from([4.25, 8.0, 16.0, 32.0]), every=st.sampled_from([1, 10, 500]),
    hidden=st.sampled_from([0.0, 0.5]), server=st.booleans(),
)  # fmt: skip
links = st.builds(Link, bytes_per_s=st.floats(1e5, 1e12), alpha_s=st.floats(0, 0.1))


@given(cases, st.floats(0.05, 0.95), st.floats(0, 0.01))
def test_the_rate_for_a_use_gives_that_use(case: Sites, use: float, alpha_s: float) -> None:
    rate = case.rate_for(use, alpha_s)
    if math.isinf(rate):
        assert case.use(Link(1e30, alpha_s)) < use * (1 + 1e-9)
    else:
        assert case.use(Link(rate, alpha_s)) == pytest.approx(use, rel=1e-6)


@given(cases, links)
def test_a_site_is_never_faster_than_alone_and_gains_from_fewer_bytes(case: Sites, link: Link) -> None:
    shorter, rarer = replace(case, bits=case.bits / 2), replace(case, every=2 * case.every)
    assert case.compute_s <= shorter.step_s(link) <= case.step_s(link)
    assert rarer.step_s(link) <= case.step_s(link) * (1 + 1e-12)
    assert rarer.bytes_per_step == pytest.approx(case.bytes_per_step / 2)


def test_two_sites_by_hand() -> None:
    # 70e9 numbers of 16 bits, each site sends all of them once: 140 GB at 10 Gbit/s take 112 s
    case = Sites(13.0, 70e9)
    assert case.exchange_s(Link.mbit(10_000)) == pytest.approx(112.0)
    assert case.use(Link.mbit(10_000)) == pytest.approx(13 / 125)


def test_a_ring_is_the_ring_of_the_network_model_and_a_server_takes_what_its_longest_ring_takes() -> None:
    link = Link(1e9, 0.02)
    assert Sites(1.0, 1e9, 8).exchange_s(link) == pytest.approx(ring_s(1e9, 8, link, 2.0))
    server, ring = Sites(1.0, 1e9, 10_000, server=True), Sites(1.0, 1e9, 10_000)
    assert server.exchange_s(Link(1e9)) == pytest.approx(ring.exchange_s(Link(1e9)), rel=1e-3)
    assert server.bytes_per_step == pytest.approx(ring.bytes_per_step / 2, rel=1e-3)


@pytest.mark.parametrize("field", [{"compute_s": 0.0}, {"numbers": -1.0}, {"every": 0}, {"hidden": 1.5}, {"sites": 0}])
def test_bad_input_names_itself(field: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        Sites(**({"compute_s": 1.0, "numbers": 1e9} | field))  # type: ignore[arg-type]

"""Laws of the models of all-reduces."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.systems import collectives
from tq.systems.collectives import Coder, Host, Link

RATES = st.floats(1e6, 1e12)
RANKS = st.integers(2, 1024)
BITS = 4.25


@given(RATES, RANKS, st.floats(1e3, 1e10))
def test_an_infinitely_fast_codec_is_never_slower_than_the_ring(rate: float, ranks: int, numbers: float) -> None:
    link = Link(rate)
    ring, ours = collectives.ring_s(numbers, ranks, link), collectives.two_phase_s(numbers, ranks, link, BITS)
    assert ours < ring and ring / ours == pytest.approx(32 / BITS)
    assert collectives.all_gather_s(numbers, ranks, link, BITS) == pytest.approx(ours * ranks / 2)


@given(RATES, RANKS, st.floats(1e6, 1e12))
def test_hosts_and_codecs_only_add_time(rate: float, ranks: int, speed: float) -> None:
    link, host, coder = Link(rate, 1e-4), Host(packets=speed), Coder(speed, speed, speed)
    free, busy = collectives.ring_s(1e6, ranks, link), collectives.ring_s(1e6, ranks, link, host=host)
    wire = collectives.ring_bytes(1e6, ranks)
    assert free <= busy <= free + wire / speed * (1 + 1e-9)
    # one more hand at the wire
    assert collectives.ring_s(1e6, ranks, link, host=Host(touch=speed)) == pytest.approx(busy)
    for model in (collectives.two_phase_s, collectives.all_gather_s):
        assert model(1e6, ranks, link, BITS) <= model(1e6, ranks, link, BITS, coder, host=host) * (1 + 1e-12)


@given(RANKS, st.floats(1e8, 1e12))
def test_the_crossover_is_where_both_take_as_long(ranks: int, speed: float) -> None:
    coder = Coder(speed, speed, speed)
    rate = collectives.crossover_bytes_per_s(1e7, ranks, BITS, coder, number_bytes=2.0)
    link = Link(rate)
    ring = collectives.ring_s(1e7, ranks, link, 2.0)
    assert collectives.two_phase_s(1e7, ranks, link, BITS, coder) == pytest.approx(ring, rel=1e-6)
    assert collectives.crossover_bytes_per_s(1e7, ranks, BITS, Coder()) == math.inf


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="ranks must be positive, got 0"):
        collectives.ring_bytes(1e6, 0)
    with pytest.raises(ValueError, match="a link needs a positive rate"):
        Link(0.0)

"""Time of all-reduces by the alpha-beta model, with a codec that takes its own time.

Symbols: n ranks, N numbers a rank, S bytes a number (4), b bits of the codec with its scales, r bytes/s of a rank's
link in each direction, alpha seconds of a round (latency, and what the library takes to start it).

A ring all-reduce takes 2(n - 1) rounds of S N / n bytes. The compressed one has two phases, reduce-scatter and
all-gather, of (n - 1)/n of b/8 N bytes each, cut into pieces: while one is on the wire another is coded, so the slower
of link and codec sets the pace and the faster one adds its share of one piece. An all-gather of codes, the published
form, sends (n - 1) codes a rank.

Source of the ring's cost: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH,
2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tq.systems.bisect import largest

FP32 = 4.0
PIPELINE_ELEMENTS = 1 << 22  # numbers that a compressed all-reduce of `tq.train` sends at a time


@dataclass(frozen=True)
class Link:
    """A rank's link: ``bytes_per_s`` in each direction, ``alpha_s`` a round, ``framing``: wire bytes a payload byte."""

    bytes_per_s: float
    alpha_s: float = 0.0
    framing: float = 1.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.alpha_s < 0 or self.framing < 1:
            raise ValueError(f"a link needs a positive rate, alpha_s >= 0 and framing >= 1, got {self}")

    @classmethod
    def mbit(cls, rate: float, alpha_s: float = 0.0, framing: float = 1.0) -> Link:
        return cls(rate * 1e6 / 8, alpha_s, framing)

    def seconds(self, payload_bytes: float) -> float:
        return payload_bytes * self.framing / self.bytes_per_s


@dataclass(frozen=True)
class Coder:
    """Numbers a second that a rank encodes, decodes, and decodes while adding to a sum; inf: takes no time."""

    encode: float = math.inf
    decode: float = math.inf
    accumulate: float = math.inf


@dataclass(frozen=True)
class Host:
    """What the cores of a rank do in an exchange; inf: takes no time.

    Attributes:
        packets: payload bytes a second that they can send while as many arrive.
        touch: bytes a second that they add up, cast or copy besides.
    """

    packets: float = math.inf
    touch: float = math.inf


def wire_s(payload_bytes: float, link: Link, host: Host) -> float:
    """Seconds that a payload is on its way, where neither the link nor what the host does for it waits for the others
    altogether: the root of the sum of squares, which is the largest one unless they are close."""
    return math.hypot(link.seconds(payload_bytes), payload_bytes / host.packets, payload_bytes / host.touch)


def _ranks(ranks: int) -> float:
    if ranks < 1:
        raise ValueError(f"ranks must be positive, got {ranks}")
    return (ranks - 1) / ranks


def ring_bytes(numbers: float, ranks: int, number_bytes: float = FP32) -> float:
    """Payload a rank sends in a ring all-reduce."""
    return 2 * _ranks(ranks) * numbers * number_bytes


def two_phase_bytes(numbers: float, ranks: int, bits: float) -> float:
    """Payload a rank sends in the compressed all-reduce; bits: a number, with its share of the scales."""
    return 2 * _ranks(ranks) * numbers * bits / 8


def all_gather_bytes(numbers: float, ranks: int, bits: float) -> float:
    """Payload a rank sends when everybody's code goes to everybody."""
    return (ranks - 1) * numbers * bits / 8


def ring_s(numbers: float, ranks: int, link: Link, number_bytes: float = FP32, host: Host = Host()) -> float:
    """A ring all-reduce; the host touches each byte that it sends."""
    return wire_s(ring_bytes(numbers, ranks, number_bytes), link, host) + 2 * (ranks - 1) * link.alpha_s


def two_phase_s(
    numbers: float, ranks: int, link: Link, bits: float, coder: Coder = Coder(), piece: float = PIPELINE_ELEMENTS, *,
    host: Host = Host(),
) -> float:  # fmt: skip
    """The compressed all-reduce, in pieces of so many numbers; a rank starts n - 1 messages in each phase."""
    share = 1 / ranks
    coded = numbers * (1 / coder.encode + 1 / coder.accumulate + share / coder.encode + 1 / coder.decode)
    wire = wire_s(two_phase_bytes(numbers, ranks, bits), link, host)
    pieces = max(1, math.ceil(numbers / piece))
    # of the rounds, those of one piece are not hidden behind the others
    return max(wire, coded) + min(wire, coded) / pieces + 2 * (ranks - 1) * link.alpha_s


def all_gather_s(
    numbers: float, ranks: int, link: Link, bits: float, coder: Coder = Coder(), host: Host = Host()
) -> float:
    """Everybody's code to everybody, one after another: encoding, sending, decoding all of them."""
    coded = numbers * (1 / coder.encode + ranks / coder.accumulate)
    return wire_s(all_gather_bytes(numbers, ranks, bits), link, host) + coded + link.alpha_s * (ranks > 1)


def crossover_bytes_per_s(
    numbers: float, ranks: int, bits: float, coder: Coder, *, number_bytes: float = FP32,
    piece: float = PIPELINE_ELEMENTS, alpha_s: float = 0.0,
) -> float:  # fmt: skip
    """Rate of the link above which the plain ring is faster than the compressed all-reduce; inf where it never is."""

    def gain(rate: float) -> float:
        link = Link(rate, alpha_s)
        return ring_s(numbers, ranks, link, number_bytes) - two_phase_s(numbers, ranks, link, bits, coder, piece)

    slowest, fastest = 1e3, 1e15
    if gain(fastest) >= 0:
        return math.inf
    if gain(slowest) <= 0:
        return 0.0
    step = math.log1p(1e-9)
    steps = largest(lambda n: gain(slowest * math.exp(n * step)) > 0, math.ceil(math.log(fastest / slowest) / step))
    return slowest * math.exp(steps * step)

"""What collectives send, round by round, and how long they take on a fabric under a placement of their ranks.

A collective is a list of rounds; in each, some ranks send to others at once, and the next begins when all are through.
A round takes as long as its slowest flow, plus ``alpha_s`` and the latency of its longest way. All-to-all is one round
in which everybody sends to everybody; with many ranks, some of its shifts are computed and stand for all.
Not modelled: the time of adding up, overlap of rounds, and what a library does beside.

Sources: Thakur, Rabenseifner, Gropp 2005 (ring, doubling, halving and doubling, tree).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tq.systems import fluid
from tq.systems.arguments import instance, one_of, positive, positive_int
from tq.systems.fabrics import Fabric, Floats, Ints
from tq.systems.routing import Router

LAYOUTS = ("packed", "interleaved", "random")
ALL_PAIRS = 64  # ranks up to which all-to-all is one round
SHIFTS = 16  # of an all-to-all of more ranks that are computed


@dataclass(frozen=True, eq=False)
class Round:
    """Ranks ``sources`` send a ``share`` of the collective's bytes to ``destinations`` at once, ``times`` in turn."""

    sources: Ints
    destinations: Ints
    share: float
    times: float = 1.0


def _power(ranks: int) -> int:
    exponent = ranks.bit_length() - 1
    if 1 << exponent != ranks:
        raise ValueError(f"ranks must be a power of two for this collective, got {ranks}")
    return exponent


def ring(ranks: int) -> list[Round]:
    """All-reduce around a ring: 2 (n - 1) rounds of a part of 1 / n to the next rank."""
    me = np.arange(ranks)
    return [Round(me, (me + 1) % ranks, 1 / ranks, 2 * (ranks - 1))] if ranks > 1 else []


def doubling(ranks: int) -> list[Round]:
    """All-reduce by recursive doubling: log2 n rounds of everything with the rank at distance 1, 2, 4, ..."""
    me = np.arange(ranks)
    return [Round(me, me ^ (1 << i), 1.0) for i in range(_power(ranks))]


def halving(ranks: int) -> list[Round]:
    """All-reduce by recursive halving and doubling [Rabenseifner]: 2 log2 n rounds, 2 (n - 1) / n of the bytes.

    Most bytes go to the nearest rank, at distance 1, which a packed placement has in the same rack.
    """
    me = np.arange(ranks)
    return [Round(me, me ^ (1 << i), 2.0 ** -(i + 1), 2) for i in range(_power(ranks))]


def binary_tree(ranks: int) -> list[Round]:
    """All-reduce to rank 0 and back over a binomial tree: 2 ceil(log2 n) rounds of everything."""
    rounds = []
    for i in range(math.ceil(math.log2(ranks))):
        child = np.arange(1 << i, ranks, 2 << i)
        rounds.append(Round(child, child - (1 << i), 1.0))
    return rounds + [Round(r.destinations, r.sources, 1.0) for r in reversed(rounds)]


def two_level(ranks: int, group: int) -> list[Round]:
    """All-reduce within groups of consecutive ranks and, a part each, across them: rings on both levels."""
    positive_int("group", group)
    if ranks % group:
        raise ValueError(f"group must divide the {ranks} ranks, got {group}")
    me, groups, rounds = np.arange(ranks), ranks // group, []
    if group > 1:
        near = me // group * group + (me + 1) % group
        rounds.append(Round(me, near, 1 / group, 2 * (group - 1)))
    if groups > 1:
        rounds.append(Round(me, (me + group) % ranks, 1 / ranks, 2 * (groups - 1)))
    return rounds


def all_to_all(ranks: int) -> list[Round]:
    """Everybody's bytes in n parts, one for each rank."""
    me = np.arange(ranks)
    if ranks <= ALL_PAIRS:
        a, b = np.divmod(np.arange(ranks * ranks), ranks)
        return [Round(a[a != b], b[a != b], 1 / ranks)] if ranks > 1 else []
    shifts = 1 + ((np.arange(SHIFTS) + 0.5) / SHIFTS * (ranks - 1)).astype(int)
    return [Round(me, (me + shift) % ranks, 1 / ranks, (ranks - 1) / len(shifts)) for shift in shifts]


def permutation(ranks: int, seed: int = 0) -> list[Round]:
    """Everybody sends everything to one other rank, drawn at random."""
    order = np.random.default_rng(seed).permutation(ranks)
    return [Round(order, np.roll(order, 1), 1.0)] if ranks > 1 else []


def opposite(ranks: int) -> list[Round]:
    """Everybody sends everything to the rank half of all further on, as pipeline stages do."""
    me = np.arange(ranks)
    return [Round(me, (me + ranks // 2) % ranks, 1.0)] if ranks > 1 else []


def incast(ranks: int) -> list[Round]:
    """Everybody sends everything to rank 0."""
    others = np.arange(1, ranks)
    return [Round(others, np.zeros_like(others), 1.0)] if ranks > 1 else []


#: Name on the command line -> what it sends; two-level with a group of the racks' size stands apart.
TRAFFIC: dict[str, Callable[[int], list[Round]]] = {
    "ring": ring, "doubling": doubling, "halving": halving, "tree": binary_tree, "all-to-all": all_to_all,
    "permutation": permutation, "opposite": opposite, "incast": incast,
}  # fmt: skip


def layout(fabric: Fabric, kind: str = "packed", seed: int = 0) -> Ints:
    """Host of every rank, int64 [hosts]: packed, rack after rack; interleaved, a host of each rack in turn; random."""
    instance("fabric", fabric, Fabric)
    one_of("layout", kind, LAYOUTS)
    positive_int("seed", seed, 0)
    if kind == "random":
        return np.random.default_rng(seed).permutation(fabric.hosts)
    if kind == "packed":
        return np.arange(fabric.hosts)
    within = np.arange(fabric.hosts) - np.searchsorted(fabric.rack, fabric.rack)
    return np.lexsort((fabric.rack, within))


@dataclass(frozen=True)
class Cost:
    """Of a collective: ``seconds``, ``latency_s`` of them for rounds and hops; ``worst``: how many times as long as at
    the full rate of a host's link its slowest round takes to send."""

    seconds: float
    latency_s: float
    worst: float


def collective(
    router: Router, rounds: Sequence[Round], hosts: Any, nbytes: float, policy: str = "ecmp", seed: int = 0, *,
    bytes_per_s: float = 1.0, alpha_s: float = 0.0, hop_s: float = 0.0,
) -> Cost:  # fmt: skip
    """Time of a collective.

    Arguments:
        router: of the fabric; rounds: what is sent; hosts: host of each rank, int [ranks].
        nbytes: that each rank holds; policy, seed: as of ``Router.route``.
        bytes_per_s: of a link of rate 1; alpha_s: of a round; hop_s: of each link on the way.
    """
    place = np.asarray(hosts, np.int64)
    for name, value in (("nbytes", nbytes), ("alpha_s", alpha_s), ("hop_s", hop_s)):
        positive(name, value, zero=True, finite=True)
    positive("bytes_per_s", bytes_per_s, finite=True)
    sending = waiting = worst = 0.0
    for r in rounds:
        routes = router.route(place[r.sources], place[r.destinations], policy, seed)
        slow = fluid.slowest_s(routes, router.fabric.rates, 1.0)
        sending += r.times * r.share * nbytes / bytes_per_s * slow
        waiting += r.times * (alpha_s + hop_s * float(routes.hops.max(initial=0)))
        worst = max(worst, slow)
    return Cost(sending + waiting, waiting, worst)


def link_load(router: Router, rounds: Sequence[Round], hosts: Any, policy: str = "ecmp", seed: int = 0) -> Floats:
    """Bytes over every link, of each byte that a rank holds, over its rate: float64 [links]."""
    place, load = np.asarray(hosts, np.int64), np.zeros(router.fabric.links)
    for r in rounds:
        routes = router.route(place[r.sources], place[r.destinations], policy, seed)
        load += r.times * r.share * np.bincount(routes.link, routes.share, router.fabric.links)
    return np.divide(load, router.fabric.rates, out=np.zeros_like(load), where=router.fabric.rates > 0)

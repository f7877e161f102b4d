"""What the shape of a network decides: rounds of a collective, hops, and how much the links above a rack hold back.

A ring all-reduce takes 2 (n - 1) rounds, a tree 2 ceil(log2 n): halving and doubling exchange the same 2 (n - 1) / n of
the bytes as a ring, so only latency differs. A fat tree of switches with k ports carries k^3 / 4 hosts with as much
bandwidth at every level as its hosts have. Not modelled: congestion, routing, failed links.

Sources: Thakur, Rabenseifner, Gropp 2005 (Optimization of Collective Communication Operations in MPICH), section 4;
Al-Fares, Loukissas, Vahdat 2008 (A Scalable, Commodity Data Center Network Architecture), section 3; Leiserson 1985.
"""

from __future__ import annotations

import math

from tq.systems import collectives
from tq.systems.arguments import positive, positive_int
from tq.systems.collectives import FP32, Link


def ring_rounds(ranks: int) -> int:
    """Rounds of a ring all-reduce, 2 (n - 1): a reduce-scatter and an all-gather."""
    positive_int("ranks", ranks)
    return 2 * (ranks - 1)


def tree_rounds(ranks: int) -> int:
    """Rounds of an all-reduce by halving and doubling, or up and down a binary tree: 2 ceil(log2 n)."""
    positive_int("ranks", ranks)
    return 2 * math.ceil(math.log2(ranks))


def tree_s(numbers: float, ranks: int, link: Link, number_bytes: float = FP32) -> float:
    """Seconds of an all-reduce by halving and doubling: 2 ceil(log2 n) alpha + 2 (n - 1) / n S / B."""
    return link.seconds(collectives.ring_bytes(numbers, ranks, number_bytes)) + tree_rounds(ranks) * link.alpha_s


def ring_over_tree(payload_bytes: float, ranks: int, link: Link) -> float:
    """How many times as long as the tree the ring takes: (n - 1) / log2 n for no bytes, 1 for many."""
    positive("payload_bytes", payload_bytes, zero=True, finite=True)
    numbers = payload_bytes / FP32
    return collectives.ring_s(numbers, ranks, link) / tree_s(numbers, ranks, link)


def oversubscription(host_rate: float, hosts: int, uplink_rate: float, uplinks: int) -> float:
    """Bandwidth of a switch's hosts over that of its uplinks, in one unit: 1 in a fat tree, 8 where hosts that all send
    outwards get an eighth of their rate."""
    positive("host_rate", host_rate, finite=True)
    positive_int("hosts", hosts)
    positive("uplink_rate", uplink_rate, finite=True)
    positive_int("uplinks", uplinks)
    return host_rate * hosts / (uplink_rate * uplinks)


def _ports(ports: int) -> int:
    positive_int("ports", ports, 2)
    if ports % 2:
        raise ValueError(f"ports must be even, half of them up and half of them down, got {ports}")
    return ports


def fat_tree_hosts(ports: int) -> int:
    """Hosts of a three-level fat tree of switches with k ports: k^3 / 4 [Al-Fares 2008]."""
    return _ports(ports) ** 3 // 4


def fat_tree_switches(ports: int) -> int:
    """Its switches: k pods of k, and (k / 2)^2 in the core, 5 k^2 / 4 together [Al-Fares 2008]."""
    return 5 * _ports(ports) ** 2 // 4


def fat_tree_hops(ports: int, host_a: int, host_b: int) -> int:
    """Links between two hosts, counted from 0: 2 below one switch, 4 within a pod, 6 across the core, 0 to itself."""
    half = _ports(ports) // 2
    for name, host in (("host_a", host_a), ("host_b", host_b)):
        positive_int(name, host, 0)
        if host >= fat_tree_hosts(ports):
            raise ValueError(f"{name} must be below {fat_tree_hosts(ports)} with {ports} ports, got {host}")
    if host_a == host_b:
        return 0
    if host_a // half == host_b // half:
        return 2
    return 4 if host_a // half**2 == host_b // half**2 else 6

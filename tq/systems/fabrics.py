"""Networks as graphs: trees, fat trees, leaf and spine, three levels, rails, tori, dragonflies; and their bills.

Hosts are nodes 0 ... hosts - 1, switches follow. A cable is two links, one a direction: link 2 i leads from its first
end to its second, link 2 i + 1 back. Rates are in any one unit; the builders count in rates of a host's link.
Not here: which way a flow takes (`tq.systems.routing`), and how fast it is (`tq.systems.fluid`).

Sources: Leiserson 1985 (fat trees); Al-Fares, Loukissas, Vahdat 2008, section 3 (k-ary ones); Kim, Dally, Scott, Abts
2008 (dragonfly); Llama 3, arXiv:2407.21783, section 3.3.1 (three levels, 1:7 at the top); Wang et al., arXiv:2307.12169
(rails).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import one_number, positive, positive_int

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

INSIDE, COPPER, OPTICAL = 0, 1, 2  # what a link is made of: part of a server, a short cable, one with two transceivers


@dataclass(frozen=True, eq=False)
class Fabric:
    """Nodes and links.

    Attributes:
        name: of the shape.
        hosts: how many.
        tails, heads: node at which each link starts and ends, int64 [links].
        rates: of the links, float64 [links], 0 where one has failed.
        lengths: what a link adds to the way, float64 [links]; the shortest ways are taken, inf is none.
        rack: of each host, int64 [hosts], counted from 0: hosts of one rack are behind the same switch.
        levels: of each node, int64 [nodes]; 0 for hosts.
        material: of the links, int64 [links]: INSIDE, COPPER or OPTICAL.
    """

    name: str
    hosts: int
    tails: Ints
    heads: Ints
    rates: Floats
    lengths: Floats
    rack: Ints
    levels: Ints
    material: Ints

    @property
    def nodes(self) -> int:
        return len(self.levels)

    @property
    def links(self) -> int:
        return len(self.tails)

    @property
    def switches(self) -> int:
        """Nodes that are no hosts and do more than join the GPUs of a server."""
        return int(np.sum(self.levels > 0))

    def without(self, cables: Sequence[int]) -> Fabric:
        """The same with these cables out of order, both directions; links keep their numbers."""
        rates, lengths = self.rates.copy(), self.lengths.copy()
        for cable in cables:
            positive_int("cables", cable, 0)
            if cable >= self.links // 2:
                raise ValueError(f"cables must be below {self.links // 2}, got {cable}")
            rates[2 * cable : 2 * cable + 2], lengths[2 * cable : 2 * cable + 2] = 0.0, np.inf
        return replace(self, rates=rates, lengths=lengths)

    def uplinks(self) -> Ints:
        """Links from a switch of level 1 upwards."""
        return np.flatnonzero((self.levels[self.tails] == 1) & (self.levels[self.heads] > 1))


class _Plan:
    """Cables that are collected until the fabric is made."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, Any, Any, float, int]] = []

    def cables(self, a: Any, b: Any, rate: Any = 1.0, length: float = 1.0, material: int = OPTICAL) -> None:
        self.rows.append((a, b, rate, length, material))

    def fabric(self, name: str, rack: Any, levels: Any) -> Fabric:
        columns: list[list[NDArray[Any]]] = [[], [], [], [], []]
        for row in self.rows:
            for column, values in zip(columns, np.broadcast_arrays(*map(np.atleast_1d, row)), strict=True):
                column.append(values.ravel())
        a, b, rate, length, material = (np.concatenate(c) if c else np.zeros(0) for c in columns)
        ends = np.stack([a, b]).astype(np.int64)
        return Fabric(
            name, len(rack), ends.T.ravel(), ends[::-1].T.ravel(), np.repeat(rate.astype(float), 2),
            np.repeat(length.astype(float), 2), np.asarray(rack, np.int64), np.asarray(levels, np.int64),
            np.repeat(material.astype(np.int64), 2),
        )  # fmt: skip


def tree(arity: int, depth: int, fat: bool = False) -> Fabric:
    """A tree with arity**depth hosts as leaves; fat: each link is as fast as all hosts below it, else as one host."""
    positive_int("arity", arity, 2)
    positive_int("depth", depth)
    hosts = arity**depth
    if hosts > 1 << 20:
        raise ValueError(f"arity ** depth must be at most {1 << 20} hosts, got {hosts}")
    plan, levels, below = _Plan(), [np.zeros(hosts, np.int64)], np.arange(hosts)
    for level in range(1, depth + 1):
        first, count = sum(map(len, levels)), len(below) // arity
        above = first + np.arange(count)
        rate = float(arity ** (level - 1)) if fat else 1.0
        plan.cables(below, np.repeat(above, arity), rate, material=COPPER if level == 1 else OPTICAL)
        levels.append(np.full(count, level))
        below = above
    return plan.fabric("fat tree" if fat else "tree", np.arange(hosts) // arity, np.concatenate(levels))


def _parallel(rate: float) -> tuple[int, float]:
    """(cables, rate of each) of a trunk of so many host rates: cables of a host's rate where they are whole."""
    count = round(rate)
    return (count, 1.0) if count >= 1 and abs(rate - count) < 1e-9 else (1, rate)


def leaf_spine(
    leaves: int, hosts_per_leaf: int, spines: int, oversubscription: float = 1.0, hosts: int | None = None, *,
    parallel: bool = True,
) -> Fabric:  # fmt: skip
    """Every leaf joined to every spine; a leaf's hosts have ``oversubscription`` times the rate of its uplinks.

    hosts: how many there are if the last leaf is not full; None: leaves * hosts_per_leaf. parallel: what is faster
    than a host's link is several cables, over which flows are hashed, not one fast one.
    """
    for name, value in (("leaves", leaves), ("hosts_per_leaf", hosts_per_leaf), ("spines", spines)):
        positive_int(name, value)
    one_number("oversubscription", oversubscription)
    full = leaves * hosts_per_leaf
    hosts = full if hosts is None else hosts
    positive_int("hosts", hosts)
    if not full - hosts_per_leaf < hosts <= full:
        raise ValueError(f"hosts must need all of {leaves} leaves of {hosts_per_leaf}, got {hosts}")
    plan, rack = _Plan(), np.arange(hosts) // hosts_per_leaf
    leaf, spine = hosts + np.arange(leaves), hosts + leaves + np.arange(spines)
    plan.cables(np.arange(hosts), leaf[rack], material=COPPER)
    trunk = hosts_per_leaf / (spines * oversubscription)
    count, rate = _parallel(trunk) if parallel else (1, trunk)
    plan.cables(np.repeat(leaf, spines * count), np.tile(np.repeat(spine, count), leaves), rate)
    return plan.fabric("leaf-spine", rack, np.repeat([0, 1, 2], [hosts, leaves, spines]))


def leaf_spine_of(hosts: int, oversubscription: float = 1.0, ports: int = 64) -> Fabric:
    """The smallest leaf and spine of switches with so many ports that carries these hosts.

    A leaf has u = floor(ports / (1 + oversubscription)) uplinks and u * oversubscription hosts. ValueError where two
    levels are not enough.
    """
    positive_int("hosts", hosts)
    positive_int("ports", ports, 2)
    one_number("oversubscription", oversubscription)
    up = math.floor(ports / (1 + oversubscription))
    down = math.floor(up * oversubscription + 1e-9)
    if up < 1 or down < 1:
        raise ValueError(f"oversubscription {oversubscription:g} leaves no uplink or no host on {ports} ports")
    leaves = math.ceil(hosts / down)
    if leaves > ports:
        most = f"at most {ports * down} hosts at {oversubscription:g}:1"
        raise ValueError(f"two levels of {ports} ports carry {most}, got {hosts}")
    spines = next(s for s in range(1, up + 1) if up % s == 0 and s * ports >= leaves * up)
    return leaf_spine(leaves, down, spines, down / up, hosts)


@dataclass(frozen=True)
class Pods:
    """A network of three levels: ``pods`` of ``leaves`` with ``hosts`` each, joined by ``aggregations`` in the pod and
    ``cores`` above each of these; the hosts of a leaf have ``leaf_ratio`` times the rate of its uplinks, what enters a
    pod's second level from below ``pod_ratio`` times that of the links to the core."""

    pods: int
    leaves: int
    hosts: int
    aggregations: int
    cores: int
    leaf_ratio: float = 1.0
    pod_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("pods", "leaves", "hosts", "aggregations", "cores"):
            positive_int(name, getattr(self, name))
        one_number("leaf_ratio", self.leaf_ratio)
        one_number("pod_ratio", self.pod_ratio)


def three_level(shape: Pods, name: str = "three levels") -> Fabric:
    """Leaves, aggregation switches within pods, and a core, every aggregation switch to its own group of cores."""
    p, s = shape.pods, shape
    hosts, leaves, middle, cores = p * s.leaves * s.hosts, p * s.leaves, p * s.aggregations, s.aggregations * s.cores
    plan, rack = _Plan(), np.arange(hosts) // s.hosts
    leaf, middle_0 = hosts + np.arange(leaves), hosts + leaves
    plan.cables(np.arange(hosts), leaf[rack], material=COPPER)
    count, rate = _parallel(s.hosts / (s.aggregations * s.leaf_ratio))
    of_leaf = middle_0 + (np.arange(leaves) // s.leaves * s.aggregations)[:, None] + np.arange(s.aggregations)
    plan.cables(np.repeat(leaf, s.aggregations * count), np.repeat(of_leaf.ravel(), count), rate)
    count, rate = _parallel(s.leaves * s.hosts / (s.aggregations * s.leaf_ratio * s.pod_ratio * s.cores))
    switch = np.arange(middle)
    core = middle_0 + middle + (switch % s.aggregations * s.cores)[:, None] + np.arange(s.cores)
    plan.cables(np.repeat(middle_0 + switch, s.cores * count), np.repeat(core.ravel(), count), rate)
    return plan.fabric(name, rack, np.repeat([0, 1, 2, 3], [hosts, leaves, middle, cores]))


def fat_tree(ports: int) -> Fabric:
    """The k-ary fat tree: k^3 / 4 hosts, 5 k^2 / 4 switches, as fast at every level as its hosts [Al-Fares 2008]."""
    positive_int("ports", ports, 2)
    if ports % 2:
        raise ValueError(f"ports must be even, half of them up and half of them down, got {ports}")
    half = ports // 2
    return three_level(Pods(ports, half, half, half, half), "fat tree")


def rails(
    servers: int, gpus: int = 8, pods: int = 1, spines: int = 1, oversubscription: float = 1.0, *,
    inside_rate: float = 9.0,
) -> Fabric:  # fmt: skip
    """Servers whose GPUs of equal number share a leaf, their rail; hosts are the GPUs, server by server.

    servers: of each pod, which has a leaf for each rail; spines: that join the leaves of several pods, none in one.
    inside_rate: of a GPU's link to the others of its server, in rates of its network link (H100: 450 over 50 GB/s).
    Such a link is a quarter as long as a cable, so that a GPU reaches another rail by way of its server.
    """
    for name, value in (("servers", servers), ("gpus", gpus), ("pods", pods), ("spines", spines)):
        positive_int(name, value)
    one_number("oversubscription", oversubscription)
    one_number("inside_rate", inside_rate)
    hosts, leaves, tops, plan = pods * servers * gpus, pods * gpus, spines * (pods > 1), _Plan()
    server, pod = np.arange(hosts) // gpus, np.arange(hosts) // (servers * gpus)
    plan.cables(np.arange(hosts), hosts + pod * gpus + np.arange(hosts) % gpus)
    if tops:
        count, rate = _parallel(servers / (spines * oversubscription))
        spine = np.repeat(hosts + leaves + np.arange(spines), count)
        plan.cables(np.repeat(hosts + np.arange(leaves), spines * count), np.tile(spine, leaves), rate)
    plan.cables(np.arange(hosts), hosts + leaves + tops + server, inside_rate, 0.25, INSIDE)
    return plan.fabric("rails", server, np.repeat([0, 1, 2, -1], [hosts, leaves, tops, pods * servers]))


def torus(*sides: int) -> Fabric:
    """A torus of two or three (or more) dimensions, whose hosts pass on what is not for them; a rack is a line along
    the last dimension."""
    if not sides:
        raise ValueError("sides must name the length of at least one dimension")
    for side in sides:
        positive_int("sides", side)
    hosts, plan = math.prod(sides), _Plan()
    number = np.arange(hosts).reshape(sides)
    for axis, side in enumerate(sides):
        if side == 2:  # the way round is the same cable
            plan.cables(np.take(number, 0, axis).ravel(), np.take(number, 1, axis).ravel())
        elif side > 2:
            plan.cables(number.ravel(), np.roll(number, -1, axis).ravel())
    return plan.fabric("torus", np.arange(hosts) // sides[-1], np.zeros(hosts, np.int64))


def dragonfly(routers: int, hosts: int, global_links: int, groups: int | None = None) -> Fabric:
    """Groups of ``routers``, all joined to one another, with so many hosts and global links each.

    groups: default the most, routers * global_links + 1, every pair of groups joined by one cable. [Kim 2008] balances
    routers = 2 hosts = 2 global_links. A global cable is three times as long as another, so that a way takes one.
    """
    for name, value in (("routers", routers), ("hosts", hosts), ("global_links", global_links)):
        positive_int(name, value)
    most = routers * global_links + 1
    groups = most if groups is None else groups
    positive_int("groups", groups)
    if groups > most:
        raise ValueError(f"groups must be at most routers * global_links + 1 = {most}, got {groups}")
    count, plan = groups * routers * hosts, _Plan()
    rack = np.arange(count) // hosts
    plan.cables(np.arange(count), count + rack, material=COPPER)
    first = count + np.arange(groups) * routers
    for a in range(routers):
        for b in range(a + 1, routers):
            plan.cables(first + a, first + b, material=COPPER)
    for a in range(groups):
        for b in range(a + 1, groups):  # port d - 1 of a group leads to the group d further on
            port_a, port_b = b - a - 1, (a - b - 1) % groups
            plan.cables(first[a] + port_a // global_links, first[b] + port_b // global_links, length=3.0)
    return plan.fabric("dragonfly", rack, np.repeat([0, 1], [count, groups * routers]))


@dataclass(frozen=True)
class Bill:
    """What a fabric is made of, and dollars a host: switches, their ports in use, cables, transceivers (two an optical
    cable)."""

    switches: int
    ports: int
    cables: int
    transceivers: int
    per_host: float


#: A bill of materials for 1,024 H100 (SemiAnalysis, by way of data/sources.csv, ib-bom): 48 switches of 64 ports for
#: 1.728 M$, 36,000 each, and cables with their optics for 2.621 M$; two a host, so 1,280 $ each.
PORT_DOLLARS, CABLE_DOLLARS = 36_000.0 / 64, 1_280.0


def bill(fabric: Fabric, port_dollars: float = PORT_DOLLARS, cable_dollars: float = CABLE_DOLLARS) -> Bill:
    """Counts of a fabric, and its dollars a host; a link faster than a host's is several cables.

    A switch costs by its ports in use, so that small ones are not priced as large ones; copper costs as optics do.
    Prices are of 400 Gbit/s a port.
    """
    positive("port_dollars", port_dollars, zero=True, finite=True)
    positive("cable_dollars", cable_dollars, zero=True, finite=True)
    outside = fabric.material[::2] > INSIDE
    cables = np.ceil(fabric.rates[::2] - 1e-9) * outside
    optical = np.sum(cables[fabric.material[::2] == OPTICAL])
    ends = (fabric.levels[fabric.tails[::2]] > 0).astype(int) + (fabric.levels[fabric.heads[::2]] > 0)
    ports = float(np.sum(cables * ends))
    dollars = ports * port_dollars + float(cables.sum()) * cable_dollars
    return Bill(fabric.switches, int(ports), int(cables.sum()), int(2 * optical), dollars / fabric.hosts)

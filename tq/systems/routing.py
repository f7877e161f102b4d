"""The ways of flows through a fabric: one, one of several by a hash, all of several at once, or by a detour.

Every policy takes shortest ways only (Valiant's: two of them). A hash is drawn for each pair of source and destination
at each switch, so that a connection keeps its way; two large ones may share a link while another lies idle.
Not modelled: adaptive routing, queues, order of packets.

Sources: RFC 2992 (ECMP by hash); Valiant 1982; Thaler, Ravishankar 1998 (highest random weight, as resilient hashing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import instance, one_of, positive_int
from tq.systems.fabrics import Fabric, Floats, Ints

#: single: always the first way, as in a spanning tree. destination: by the digits of its number. ecmp: by a hash.
#: resilient: by the highest of the hashes of flow and link, so that a failed link moves only its own flows. spray: in
#: equal parts over all. valiant: by a switch drawn at random, ecmp on both legs.
POLICIES = ("single", "destination", "ecmp", "resilient", "spray", "valiant")
_AT_ONCE = 1 << 23  # entries of the table of next links that one step may take


@dataclass(frozen=True, eq=False)
class Routes:
    """Which flow uses which link, and with which share of itself.

    Attributes:
        flow, link: int64 [entries], sorted by flow; share: float64 [entries], the part of the flow on the link.
        hops: links of each flow's way, int64 [flows]; the mean of its ways are equal, as all are shortest.
    """

    flow: Ints
    link: Ints
    share: Floats
    hops: Ints

    @property
    def flows(self) -> int:
        return len(self.hops)


def mixed(*keys: Any) -> NDArray[np.uint64]:
    """A hash of integers, uint64, by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value: NDArray[np.uint64] = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            value = value ^ np.asarray(key).astype(np.uint64)
            value = value + np.uint64(0x9E3779B97F4A7C15)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    return value


class Router:
    """Finds ways through a fabric; distances to destinations are kept between calls."""

    def __init__(self, fabric: Fabric) -> None:
        instance("fabric", fabric, Fabric)
        self.fabric = fabric
        alive = np.flatnonzero(np.isfinite(fabric.lengths))
        self._by_tail = alive[np.argsort(fabric.tails[alive], kind="stable")]
        tails = fabric.tails[self._by_tail]
        self._nodes, first = np.unique(tails, return_index=True)
        self._first = first
        degree = np.diff([*first, len(tails)])
        self._next = np.full((fabric.nodes, max(1, int(degree.max(initial=1)))), -1, np.int64)
        place = np.arange(len(tails)) - np.repeat(first, degree)
        self._next[tails, place] = self._by_tail
        self._column = np.full(fabric.nodes, -1, np.int64)
        self._distance = np.zeros((fabric.nodes, 0), np.float32)

    def _to(self, targets: Ints) -> Ints:
        """Columns of ``_distance`` of these nodes, which are added where they are new."""
        new = np.unique(targets[self._column[targets] < 0])
        if len(new):
            self._column[new] = self._distance.shape[1] + np.arange(len(new))
            self._distance = np.concatenate([self._distance, self.distances(new)], 1)
        return self._column[targets]

    def distances(self, targets: Ints) -> NDArray[np.float32]:
        """Length of the shortest way from every node to each target, float32 [nodes, targets]; inf: there is none."""
        fabric = self.fabric
        found = np.full((fabric.nodes, len(targets)), np.inf, np.float32)
        found[targets, np.arange(len(targets))] = 0
        if not len(self._by_tail):
            return found
        heads, lengths = fabric.heads[self._by_tail], fabric.lengths[self._by_tail].astype(np.float32)[:, None]
        while True:
            over = np.minimum.reduceat(found[heads] + lengths, self._first, axis=0)
            shorter = over < found[self._nodes]
            if not shorter.any():
                return found
            found[self._nodes] = np.minimum(over, found[self._nodes])

    def _choices(self, node: Ints, column: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Links out of each node, [walkers, most links], and which of them lie on a shortest way."""
        links = self._next[node]
        ahead = self._distance[self.fabric.heads[links], column[:, None]]
        here = self._distance[node, column][:, None]
        good = (links >= 0) & (np.abs(ahead + self.fabric.lengths[links] - here) < 1e-3)
        return links, good

    def _pick(self, policy: str, key: Ints, node: Ints, to: Ints, choices: Any, seed: int) -> Ints:
        links, good = choices
        if policy == "resilient":
            weight = mixed(seed, key[:, None], links)
            return links[np.arange(len(node)), np.where(good, weight, 0).argmax(1)]
        count = good.sum(1)
        order = np.cumsum(good, 1)
        if policy == "single":
            wanted = np.zeros(len(node), np.int64)
        elif policy == "destination":
            wanted = to % count
            to //= count  # in place: the next choice takes the next digit, as all would else end at the same core
        else:
            wanted = (mixed(seed, key, node) % count.astype(np.uint64)).astype(np.int64)
        at = ((order == wanted[:, None] + 1) & good).argmax(1)
        return links[np.arange(len(node)), at]

    def route(self, sources: Any, destinations: Any, policy: str = "ecmp", seed: int = 0, keys: Any = None) -> Routes:
        """Ways of flows.

        Arguments:
            sources, destinations: of the flows, hosts, int [flows]; a flow from a host to itself uses no link.
            policy: one of POLICIES.
            seed: of hashes and detours.
            keys: int [flows], what is hashed beside the seed, as ports of connections are; default: source and
                destination, so that all flows of a pair go the same way.

        Raises ValueError for hosts that do not exist, and where no way is left.
        """
        one_of("policy", policy, POLICIES)
        positive_int("seed", seed, 0)
        start, end = (self._hosts(name, v) for name, v in (("sources", sources), ("destinations", destinations)))
        if start.shape != end.shape:
            raise ValueError(f"sources and destinations must be equally many, got {len(start)} and {len(end)}")
        key = start * self.fabric.nodes + end if keys is None else np.asarray(keys, np.int64)
        if key.shape != start.shape:
            raise ValueError(f"keys must be one a flow, got {key.shape} for {len(start)} flows")
        if policy != "valiant":
            return self._legs([(start, end)], policy, key, seed)
        switches = np.flatnonzero(self.fabric.levels > 0)
        switches = switches if len(switches) else np.arange(self.fabric.nodes)
        by = switches[(mixed(seed, key, 1 << 40) % np.uint64(len(switches))).astype(np.int64)]
        by = np.where(start == end, start, by)
        return self._legs([(start, by), (by, end)], "ecmp", key, seed)

    def _hosts(self, name: str, values: Any) -> Ints:
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"{name} must be a list of whole numbers, got shape {array.shape} of {array.dtype}")
        if array.size and not 0 <= array.min() <= array.max() < self.fabric.hosts:
            raise ValueError(f"{name} must be hosts from 0 to {self.fabric.hosts - 1}")
        return array.astype(np.int64)

    def _legs(self, legs: Sequence[tuple[Ints, Ints]], policy: str, key: Ints, seed: int) -> Routes:
        parts: list[tuple[Ints, Ints, Floats]] = []
        hops = np.zeros(len(key), np.int64)
        for number, (start, end) in enumerate(legs):
            column = self._to(end)
            away = self._distance[start, column]
            if not np.isfinite(away).all():
                lost = int(np.flatnonzero(~np.isfinite(away))[0])
                raise ValueError(f"no way is left from node {start[lost]} to node {end[lost]}")
            step = max(1, _AT_ONCE // self._next.shape[1])
            for low in range(0, len(key), step):
                chosen = slice(low, low + step)
                walk = self._spray if policy == "spray" else self._walk
                for flow, link, share in walk(start[chosen], end[chosen], policy, key[chosen], seed + number):
                    parts.append((flow + low, link, share))
        flow, link, share = (
            np.concatenate([part[i] for part in parts]) if parts else np.zeros(0) for i in range(3)
        )  # fmt: skip
        order = np.argsort(flow, kind="stable")
        flow, link, share = flow[order].astype(np.int64), link[order].astype(np.int64), share[order].astype(float)
        hops += np.rint(np.bincount(flow, share, len(key))).astype(np.int64)
        return Routes(flow, link, share, hops)

    def _walk(self, start: Ints, end: Ints, policy: str, key: Ints, seed: int) -> Any:
        node, flow, digits = start.copy(), np.arange(len(start)), end.copy()
        while True:
            going = node[flow] != end[flow]
            flow = flow[going]
            if not len(flow):
                return
            here, to = node[flow], digits[flow]
            choices = self._choices(here, self._column[end[flow]])
            link = self._pick(policy, key[flow], here, to, choices, seed)
            yield flow, link, np.ones(len(flow))
            node[flow], digits[flow] = self.fabric.heads[link], to

    def _spray(self, start: Ints, end: Ints, policy: str, key: Ints, seed: int) -> Any:
        flow, node = np.arange(len(start)), start
        share: Any = np.ones(len(start))
        while True:
            going = node != end[flow]
            flow, node, share = flow[going], node[going], share[going]
            if not len(flow):
                return
            links, good = self._choices(node, self._column[end[flow]])
            walker, at = np.nonzero(good)
            link = links[walker, at]
            part = (share / good.sum(1))[walker]
            yield flow[walker], link, part
            pair = flow[walker] * self.fabric.nodes + self.fabric.heads[link]
            pair, place = np.unique(pair, return_inverse=True)
            share = np.bincount(place, part)
            flow, node = pair // self.fabric.nodes, pair % self.fabric.nodes

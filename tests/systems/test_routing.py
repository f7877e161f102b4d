"""Ways through fabrics: shortest by another library, kept by a hash, split in equal parts, moved by failures."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest

from tests.systems.test_fabrics import SHAPES, graph
from tq.systems import fabrics
from tq.systems.routing import POLICIES, Router, mixed


def pairs(hosts: int, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.random.default_rng(1).integers(0, hosts, (2, count))
    return a, b


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_way_leads_from_source_to_destination(name: str, policy: str) -> None:
    """Flow is conserved at every node, whatever the policy: +1 at the source, -1 at the destination."""
    fabric = SHAPES[name]
    a, b = pairs(fabric.hosts)
    routes = Router(fabric).route(a, b, policy, 3)
    balance = np.zeros((len(a), fabric.nodes))
    np.add.at(balance, (routes.flow, fabric.tails[routes.link]), routes.share)
    np.add.at(balance, (routes.flow, fabric.heads[routes.link]), -routes.share)
    wanted = np.zeros_like(balance)
    np.add.at(wanted, (np.arange(len(a)), a), 1.0)
    np.add.at(wanted, (np.arange(len(a)), b), -1.0)
    assert balance == pytest.approx(wanted, abs=1e-12)
    assert (np.diff(routes.flow) >= 0).all() and (routes.share > 0).all()


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "valiant"])
@pytest.mark.parametrize("name", SHAPES)
def test_ways_are_as_short_as_networkx_finds(name: str, policy: str) -> None:
    fabric = SHAPES[name]
    a, b = pairs(fabric.hosts, 60)
    routes = Router(fabric).route(a, b, policy)
    length = np.bincount(routes.flow, routes.share * fabric.lengths[routes.link], len(a))
    made = graph(fabric)
    for i in range(len(a)):
        assert length[i] == pytest.approx(nx.shortest_path_length(made, a[i], b[i], "weight"))


@pytest.mark.parametrize("name", ["k4", "clos", "torus", "dragonfly"])
def test_spraying_is_the_mean_of_many_hashes(name: str) -> None:
    """ECMP with a new hash for each of 4,000 connections of a pair comes to what spraying says at once."""
    fabric = SHAPES[name]
    router, last = Router(fabric), fabric.hosts - 1
    spray = router.route([0], [last], "spray")
    many = router.route(np.zeros(4000, int), np.full(4000, last), "ecmp", keys=np.arange(4000))
    share = np.bincount(many.link, many.share, fabric.links) / 4000
    assert share == pytest.approx(np.bincount(spray.link, spray.share, fabric.links), abs=5 * 0.5 / 4000**0.5)


def test_a_pair_keeps_its_way_and_seeds_change_it() -> None:
    router = Router(fabrics.leaf_spine(4, 8, 8))
    a, b = pairs(32)
    first, again = (router.route(a, b, "ecmp", 5) for _ in range(2))
    assert (first.link == again.link).all()
    one = router.route(a[7:8], b[7:8], "ecmp", 5)  # alone as among others
    assert (one.link == first.link[first.flow == 7]).all()
    other = router.route(a, b, "ecmp", 6)
    assert 0.02 < (other.link != first.link).mean() < 0.5


def test_single_is_a_tree_and_destination_is_one_way_for_each() -> None:
    fabric = SHAPES["k4"]
    router = Router(fabric)
    a, b = map(np.array, zip(*itertools.permutations(range(16), 2), strict=True))
    for policy in ("single", "destination"):
        routes = router.route(a, b, policy)
        out: dict[tuple[int, int], set[int]] = {}
        for flow, link in zip(routes.flow, routes.link, strict=True):
            out.setdefault((fabric.tails[link], b[flow]), set()).add(link)
        assert all(len(links) == 1 for links in out.values())
    up = np.unique(routes.link[fabric.levels[fabric.heads[routes.link]] == 3])
    assert len(up) == 16  # destinations spread over every link to the core, in one direction


def test_a_failure_moves_all_kinds_of_flows_under_ecmp_and_only_its_own_under_resilient_hashing() -> None:
    fabric = fabrics.leaf_spine(2, 64, 4, 1)
    broken_cable = 128  # the first one from leaf 0 to a spine: cables of hosts come first
    broken = fabric.without([broken_cable])
    a, b = np.arange(64).repeat(20), 64 + np.arange(64 * 20) % 64
    moved = {}
    for policy in ("ecmp", "resilient"):
        before, after = (Router(f).route(a, b, policy, 2) for f in (fabric, broken))
        hurt = np.zeros(len(a), bool)
        hurt[before.flow[before.link // 2 == broken_cable]] = True
        others = ~hurt[before.flow] & (fabric.levels[fabric.tails[before.link]] == 1)
        assert not (after.link // 2 == broken_cable).any()
        assert len(before.link) == len(after.link)
        moved[policy] = float((before.link != after.link)[others].mean())
    assert moved["resilient"] == 0.0 and moved["ecmp"] > 0.3


def test_valiant_spreads_what_is_all_between_two_groups() -> None:
    fabric = fabrics.dragonfly(4, 2, 2)
    a = np.arange(8)  # all of group 0 to all of group 1: one global cable on the shortest ways
    router = Router(fabric)
    worst = {}
    for policy in ("ecmp", "valiant"):
        routes = router.route(a, a + 8, policy, 1)
        switch = (fabric.tails[routes.link] >= fabric.hosts) & (fabric.heads[routes.link] >= fabric.hosts)
        worst[policy] = np.bincount(routes.link[switch]).max()
    assert worst["ecmp"] == 8 and worst["valiant"] <= 4


def test_the_hash_is_even() -> None:
    counts = np.bincount((mixed(3, np.arange(80_000)) % np.uint64(8)).astype(int))
    assert np.abs(counts - 10_000).max() < 4 * 100
    assert len(np.unique(mixed(np.arange(1000)[:, None], np.arange(100)))) == 100_000


def test_no_flows_and_bad_arguments() -> None:
    fabric = SHAPES["clos"]
    router = Router(fabric)
    assert router.route([], []).flows == 0 and len(router.route([3], [3]).link) == 0
    island = Router(fabric.without([0]))
    with pytest.raises(ValueError, match="no way is left from node 1 to node 0"):
        island.route([1], [0])
    for sources, destinations, options, said in (
        ([0], [12], {}, "destinations must be hosts from 0 to 11"),
        ([-1], [1], {}, "sources must be hosts"),
        ([0, 1], [1], {}, "equally many, got 2 and 1"),
        ([0], [1], {"policy": "fast"}, "policy must be one of"),
        ([0], [1], {"seed": -1}, "seed must be"),
        ([0], [1], {"keys": [1, 2]}, "keys must be one a flow"),
    ):
        with pytest.raises(ValueError, match=said):
            router.route(sources, destinations, **options)
    with pytest.raises(TypeError, match="sources must be a list of whole numbers"):
        router.route([0.5], [1])

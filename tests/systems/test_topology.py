"""Rounds, fat trees and oversubscription: the papers' counts, and a tree that is built and walked."""

import itertools

import pytest

from tq.systems import collectives, topology
from tq.systems.collectives import Link


def walk(k: int) -> dict[tuple[str, int], set[tuple[str, int]]]:
    """The fat tree of Al-Fares et al. 2008, section 3, link by link: hosts, edge, aggregation and core switches."""
    half, links = k // 2, []
    for pod in range(k):
        for edge in range(half):
            e = ("edge", pod * half + edge)
            links += [(e, ("host", (pod * half + edge) * half + i)) for i in range(half)]
            links += [(e, ("aggregation", pod * half + a)) for a in range(half)]
        for a, c in itertools.product(range(half), range(half)):
            links.append((("aggregation", pod * half + a), ("core", a * half + c)))
    graph: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for a, b in links:
        graph.setdefault(a, set()).add(b)
        graph.setdefault(b, set()).add(a)
    return graph


@pytest.mark.parametrize("k", [2, 4, 6])
def test_hosts_switches_and_hops_of_a_tree_that_is_built(k: int) -> None:
    graph = walk(k)
    hosts = [node for node in graph if node[0] == "host"]
    assert len(hosts) == topology.fat_tree_hosts(k) and len(graph) - len(hosts) == topology.fat_tree_switches(k)
    assert all(len(near) == (1 if node[0] == "host" else k) for node, near in graph.items())
    distance, front = {("host", 0): 0}, [("host", 0)]
    for node in front:
        for near in graph[node] - set(distance):
            distance[near] = distance[node] + 1
            front.append(near)
    assert all(distance[host] == topology.fat_tree_hops(k, 0, host[1]) for host in hosts)


def test_the_papers_cluster() -> None:
    assert topology.fat_tree_hosts(48) == 27_648 and topology.fat_tree_switches(48) == 2_880  # Al-Fares, section 3


def test_rounds_and_times() -> None:
    assert topology.ring_rounds(10_000) == 19_998 and topology.tree_rounds(10_000) == 28
    link = Link(50e9, 5e-6)
    # Thakur et al. 2005, section 4.5: 2 log2 p alpha + 2 (p - 1) / p n beta for p a power of two
    assert topology.tree_s(1e6, 8, link) == pytest.approx(6 * 5e-6 + 2 * 7 / 8 * 4e6 / 50e9)
    assert collectives.ring_s(35e9, 10_000, link) == pytest.approx(5.70, abs=0.005)
    assert topology.tree_s(35e9, 10_000, link) == pytest.approx(5.60, abs=0.005)
    assert topology.ring_over_tree(140e9, 10_000, link) == pytest.approx(1.018, abs=1e-3)
    assert topology.ring_over_tree(0.0, 8, link) == pytest.approx(14 / 6)
    assert topology.ring_rounds(1) == topology.tree_rounds(1) == 0


def test_oversubscription() -> None:
    assert topology.oversubscription(8 * 400, 16, 400, 16) == 8 and topology.oversubscription(400, 16, 400, 16) == 1


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="ports must be even"):
        topology.fat_tree_hosts(5)
    with pytest.raises(ValueError, match="host_b must be below 16 with 4 ports, got 16"):
        topology.fat_tree_hops(4, 0, 16)

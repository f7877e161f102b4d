"""Shapes of networks: counts of the papers, every link both ways, hosts that reach one another, and bills."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems import fabrics, topology
from tq.systems.fabrics import Fabric, Pods


def graph(fabric: Fabric) -> nx.MultiDiGraph:
    made = nx.MultiDiGraph()
    made.add_nodes_from(range(fabric.nodes))
    for link, (a, b) in enumerate(zip(fabric.tails.tolist(), fabric.heads.tolist(), strict=True)):
        if np.isfinite(fabric.lengths[link]):
            made.add_edge(a, b, link=link, weight=fabric.lengths[link])
    return made


SHAPES = {
    "tree": fabrics.tree(2, 4), "fat": fabrics.tree(3, 2, fat=True), "k4": fabrics.fat_tree(4),
    "clos": fabrics.leaf_spine(3, 4, 2, 2), "partial": fabrics.leaf_spine_of(50, 3, 16),
    "pods": fabrics.three_level(Pods(2, 2, 4, 2, 2, 1, 7)), "rail": fabrics.rails(3, 4),
    "rail pods": fabrics.rails(2, 4, 3, 2, 2), "torus": fabrics.torus(4, 2, 3), "line": fabrics.torus(5, 1),
    "dragonfly": fabrics.dragonfly(4, 2, 2), "few groups": fabrics.dragonfly(4, 2, 2, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_links_come_in_pairs_and_all_hosts_are_joined(name: str) -> None:
    fabric = SHAPES[name]
    assert (fabric.tails[::2] == fabric.heads[1::2]).all() and (fabric.heads[::2] == fabric.tails[1::2]).all()
    assert (fabric.rates[::2] == fabric.rates[1::2]).all() and (fabric.rates > 0).all()
    assert (fabric.tails != fabric.heads).all()
    assert nx.is_strongly_connected(graph(fabric))
    assert len(fabric.rack) == fabric.hosts and (fabric.levels[: fabric.hosts] == 0).all()
    assert fabric.rack[0] == 0 and set(np.diff(fabric.rack)) <= {0, 1}


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_k_ary_fat_tree_is_the_papers(k: int) -> None:
    fabric = fabrics.fat_tree(k)
    assert fabric.hosts == topology.fat_tree_hosts(k) and fabric.switches == topology.fat_tree_switches(k)
    degree = np.bincount(fabric.tails, minlength=fabric.nodes)
    assert (degree[: fabric.hosts] == 1).all() and (degree[fabric.hosts :] == k).all()  # all ports in use
    away = nx.single_source_shortest_path_length(graph(fabric), 0)
    assert all(away[h] == topology.fat_tree_hops(k, 0, h) for h in range(fabric.hosts))


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 5), st.floats(0.5, 9))
def test_a_leaf_is_oversubscribed_as_it_is_said(leaves: int, hosts: int, spines: int, ratio: float) -> None:
    fabric = fabrics.leaf_spine(leaves, hosts, spines, ratio)
    up = fabric.uplinks()
    assert np.bincount(fabric.tails[up] - fabric.hosts, fabric.rates[up]) == pytest.approx(
        np.full(leaves, hosts / ratio)
    )


@given(st.integers(1, 700), st.sampled_from([0.5, 1, 1.5, 2, 3, 4, 7]), st.sampled_from([16, 32, 64]))
@settings(deadline=None)
def test_no_switch_has_more_ports_than_it_has(hosts: int, ratio: float, ports: int) -> None:
    try:
        fabric = fabrics.leaf_spine_of(hosts, ratio, ports)
    except ValueError as error:
        assert "carry at most" in str(error) or "leaves no uplink" in str(error)
        return
    assert fabric.hosts == hosts
    degree = np.bincount(fabric.tails, minlength=fabric.nodes)[hosts:]
    assert degree.max() <= ports
    up = fabric.uplinks()
    full = np.bincount(fabric.rack) == np.bincount(fabric.rack).max()
    rate = np.bincount(fabric.tails[up] - hosts, fabric.rates[up])
    if len(full) > 1:  # never worse than asked for, and as asked where the ports allow it
        assert np.bincount(fabric.rack).max() / rate.min() <= ratio + 1e-9


def test_published_counts() -> None:
    kim = fabrics.dragonfly(16, 8, 8)  # N = a p (a h + 1) [Kim 2008, section 3.1]
    assert kim.hosts == 16 * 8 * 129 and kim.switches == 16 * 129
    group = (np.stack([kim.tails[::2], kim.heads[::2]]) - kim.hosts) // 16
    across = group[:, (group[0] >= 0) & (group[0] != group[1])]
    assert across.shape[1] == 129 * 128 // 2 == len({tuple(sorted(p)) for p in across.T.tolist()})  # one a pair
    degree = np.bincount(kim.tails, minlength=kim.nodes)
    assert set(degree[kim.hosts :]) == {8 + 15 + 8}
    pod = fabrics.torus(16, 20, 28)  # TPU v5p
    assert pod.hosts == 8_960 and pod.links == 2 * 3 * 8_960 and pod.switches == 0
    meta = Pods(8, 192, 16, 8, 2, 1, 7)  # Llama 3: 192 racks of 16 GPUs a pod, 8 pods, 1:7 above them
    built = fabrics.three_level(meta)
    assert built.hosts == 24_576
    third = (built.levels[built.tails] == 2) & (built.levels[built.heads] == 3)
    assert built.rates[third].sum() == pytest.approx(24_576 / 7)


def test_the_bill_of_a_published_cluster() -> None:
    """48 switches and 4,247 dollars a GPU for 1,024 H100 (data/sources.csv, ib-bom), from counts of ports alone."""
    found = fabrics.bill(fabrics.leaf_spine_of(1024))
    assert found.switches == 48 and found.ports == 48 * 64 and found.cables == 2048 and found.transceivers == 2048
    assert found.per_host == pytest.approx(4247, abs=1)
    assert fabrics.bill(fabrics.leaf_spine_of(1024, 4)).per_host < found.per_host / 1.5
    assert fabrics.bill(fabrics.rails(4, 8)).cables == 32  # what is inside a server is not on the bill
    assert fabrics.bill(fabrics.tree(2, 3, fat=True)).cables == 24  # a link as fast as four hosts is four cables


def test_failed_cables_keep_their_numbers() -> None:
    fabric = SHAPES["clos"]
    broken = fabric.without([12])
    assert broken.links == fabric.links and (broken.rates[24:26] == 0).all() and np.isinf(broken.lengths[24:26]).all()
    assert (np.delete(broken.rates, [24, 25]) == np.delete(fabric.rates, [24, 25])).all()
    assert fabric.rates[24] > 0
    for cable in (-1, fabric.links // 2):
        with pytest.raises(ValueError, match="cables must be"):
            fabric.without([cable])


def test_bad_arguments() -> None:
    for call, said in (
        (lambda: fabrics.fat_tree(5), "ports must be even"),
        (lambda: fabrics.leaf_spine(2, 2, 2, 0), "oversubscription must be a finite positive number"),
        (lambda: fabrics.leaf_spine(2, 4, 2, 1, 4), "must need all of 2 leaves"),
        (lambda: fabrics.leaf_spine_of(5000), "carry at most 2048 hosts at 1:1, got 5000"),
        (lambda: fabrics.leaf_spine_of(5, 1000), "leaves no uplink"),
        (lambda: fabrics.dragonfly(4, 2, 2, 10), "groups must be at most routers"),
        (lambda: fabrics.tree(1, 2), "arity must be an int of at least 2"),
        (lambda: fabrics.tree(2, 30), "must be at most 1048576 hosts"),
        (lambda: fabrics.torus(), "sides must name"),
        (lambda: fabrics.torus(3, 0), "sides must be an int of at least 1"),
        (lambda: fabrics.rails(1, 1, inside_rate=float("nan")), "inside_rate"),
        (lambda: fabrics.bill(SHAPES["k4"], -1), "port_dollars must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            call()

"""Collectives: that they compute what they are named after, send what their papers say, and where placement costs."""

from __future__ import annotations

import numpy as np
import pytest

from tq.systems import fabrics, traffic
from tq.systems.collectives import Link, ring_s
from tq.systems.routing import Router
from tq.systems.topology import ring_rounds, tree_rounds, tree_s

SIZES = (1, 2, 3, 4, 8, 12, 16, 64)


def sent(rounds: list[traffic.Round], ranks: int) -> np.ndarray:
    """Bytes that each rank sends, of each byte that it holds."""
    total = np.zeros(ranks)
    for r in rounds:
        np.add.at(total, r.sources, r.times * r.share)
    return total


@pytest.mark.parametrize("n", SIZES)
def test_bytes_and_rounds_are_the_papers(n: int) -> None:
    assert sent(traffic.ring(n), n) == pytest.approx(np.full(n, 2 * (n - 1) / n))
    assert sum(r.times for r in traffic.ring(n)) == ring_rounds(n)
    assert sent(traffic.all_to_all(n), n) == pytest.approx(np.full(n, (n - 1) / n))
    assert sum(r.times for r in traffic.binary_tree(n)) == tree_rounds(n)
    for group in (1, 2, 4):
        if n % group == 0:
            assert sent(traffic.two_level(n, group), n) == pytest.approx(np.full(n, 2 * (n - 1) / n))
    if n & (n - 1) == 0:
        assert sent(traffic.halving(n), n) == pytest.approx(np.full(n, 2 * (n - 1) / n))
        assert sum(r.times for r in traffic.halving(n)) == tree_rounds(n)
        assert sum(r.times for r in traffic.doubling(n)) == tree_rounds(n) / 2
    else:
        with pytest.raises(ValueError, match=f"ranks must be a power of two for this collective, got {n}"):
            traffic.doubling(n)


@pytest.mark.parametrize("n", [2, 8, 16])
@pytest.mark.parametrize("name", ["doubling", "tree"])
def test_everybody_has_everybodys_numbers_at_the_end(name: str, n: int) -> None:
    """Whole vectors are sent in these two; who holds whose numbers is followed as sets."""
    holds = [{rank} for rank in range(n)]
    for r in traffic.TRAFFIC[name](n):
        before = [set(h) for h in holds]
        for a, b in zip(r.sources, r.destinations, strict=True):
            holds[b] |= before[a]
    assert all(h == set(range(n)) for h in holds)


def test_all_to_all_of_many_stands_for_all_of_its_shifts() -> None:
    n = 128
    assert sent(traffic.all_to_all(n), n) == pytest.approx(np.full(n, (n - 1) / n))
    fabric = fabrics.leaf_spine(16, 8, 4, 4)
    router = Router(fabric)
    me = np.arange(n)
    every = [traffic.Round(me, (me + s) % n, 1 / n) for s in range(1, n)]
    exact = traffic.collective(router, every, me, 1.0, "spray").seconds
    assert traffic.collective(router, traffic.all_to_all(n), me, 1.0, "spray").seconds == pytest.approx(exact, rel=0.05)


def test_on_one_switch_it_is_the_alpha_beta_model() -> None:
    router, link = Router(fabrics.leaf_spine(1, 16, 1)), Link(50e9, 5e-6)
    here = traffic.layout(router.fabric)
    for rounds, model in ((traffic.ring(16), ring_s), (traffic.halving(16), tree_s)):
        cost = traffic.collective(router, rounds, here, 4e6, bytes_per_s=50e9, alpha_s=5e-6)
        assert cost.seconds == pytest.approx(model(1e6, 16, link)) and cost.worst == 1.0
    hops = traffic.collective(router, traffic.ring(16), here, 0.0, hop_s=1e-6)
    assert hops.seconds == hops.latency_s == pytest.approx(30 * 2e-6)


@pytest.mark.parametrize("ratio", [1, 2, 4, 7, 8])
def test_a_packed_ring_does_not_feel_oversubscription_and_an_interleaved_one_feels_all_of_it(ratio: float) -> None:
    router = Router(fabrics.leaf_spine(8, 8, 8, ratio))
    slow = {
        kind: traffic.collective(router, traffic.ring(64), traffic.layout(router.fabric, kind, 1), 1.0, "spray").worst
        for kind in traffic.LAYOUTS
    }
    # one flow leaves each rack and is spread over eight uplinks of 1 / ratio of a host's rate: up to 8:1 it fits
    assert slow["packed"] == pytest.approx(1.0)
    assert slow["interleaved"] == pytest.approx(ratio)
    assert 0.5 * ratio <= slow["random"] <= ratio or slow["random"] == 1.0


def test_hash_collisions_cost_more_than_a_ratio_of_two() -> None:
    router = Router(fabrics.leaf_spine(8, 8, 8))
    order = traffic.layout(router.fabric, "random", 1)
    times = [traffic.collective(router, traffic.ring(64), order, 1.0, "ecmp", seed).worst for seed in range(20)]
    assert np.mean(times) > 2 and min(times) >= 1
    assert traffic.collective(router, traffic.ring(64), order, 1.0, "spray").worst == pytest.approx(1.0)


def test_two_levels_need_the_spine_for_a_part_only() -> None:
    router = Router(fabrics.leaf_spine(4, 8, 2, 4))
    here = traffic.layout(router.fabric)
    flat = traffic.collective(router, traffic.two_level(32, 1), here, 1.0, "spray").seconds
    assert traffic.collective(router, traffic.ring(32), here, 1.0, "spray").seconds == pytest.approx(flat)
    load = traffic.link_load(router, traffic.two_level(32, 8), here, "spray")
    up = router.fabric.uplinks()
    # 8 hosts a rack send 2 * 3 / 32 of the bytes each over uplinks of together two host rates
    assert load[up] == pytest.approx(8 * 2 * 3 / 32 / 2)


def test_layouts() -> None:
    fabric = fabrics.leaf_spine_of(50, 3, 16)
    for kind in traffic.LAYOUTS:
        assert sorted(traffic.layout(fabric, kind)) == list(range(50))
    turn = fabric.rack[traffic.layout(fabric, "interleaved")]
    racks = fabric.rack.max() + 1
    assert turn[:racks].tolist() == list(range(racks))
    assert traffic.layout(fabric, "random", 1).tolist() != traffic.layout(fabric, "random", 2).tolist()


def test_a_thin_binary_tree_is_512_times_as_slow_as_a_fat_one() -> None:
    for fat, slow in ((False, 512.0), (True, 1.0)):
        router = Router(fabrics.tree(2, 10, fat))
        cost = traffic.collective(router, traffic.opposite(1024), np.arange(1024), 1.0)
        assert cost.seconds == pytest.approx(slow)


def test_bad_arguments() -> None:
    router = Router(fabrics.tree(2, 2))
    with pytest.raises(ValueError, match="group must divide the 4 ranks, got 3"):
        traffic.two_level(4, 3)
    with pytest.raises(ValueError, match="layout must be one of packed"):
        traffic.layout(router.fabric, "neat")
    with pytest.raises(ValueError, match="nbytes must be 0 or more"):
        traffic.collective(router, traffic.ring(4), np.arange(4), -1.0)
    with pytest.raises(ValueError, match="bytes_per_s must be positive"):
        traffic.collective(router, traffic.ring(4), np.arange(4), 1.0, bytes_per_s=0.0)

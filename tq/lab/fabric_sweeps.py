"""What the model of networks says over many fabrics, placements and patterns: the sweeps of a chapter.

Nothing here is measured. Times are in those of a host's link; a share lost is that of a step that waits for its
collective with nothing overlapped.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from tq.systems import fabrics, fluid, traffic
from tq.systems.ask_topology import build, rounds_of
from tq.systems.fabrics import Ints
from tq.systems.routing import Router

#: Networks that are compared, all for the same hosts: label -> (shape of `tq.systems topology`, oversubscription,
#: routing).
CANDIDATES = {
    "fat tree, sprayed": ("fat-tree", 1.0, "spray"),
    "fat tree, hashed": ("fat-tree", 1.0, "ecmp"),
    "leaf-spine 1:1, sprayed": ("leaf-spine", 1.0, "spray"),
    "leaf-spine 1:1, hashed": ("leaf-spine", 1.0, "ecmp"),
    "leaf-spine 4:1, sprayed": ("leaf-spine", 4.0, "spray"),
    "leaf-spine 4:1, hashed": ("leaf-spine", 4.0, "ecmp"),
    "rails, sprayed": ("rails", 1.0, "spray"),
    "torus": ("torus", 1.0, "spray"),
    "dragonfly": ("dragonfly", 1.0, "ecmp"),
    "dragonfly, detours": ("dragonfly", 1.0, "valiant"),
    "binary tree": ("tree", 1.0, "single"),
}
TRAFFICS = ("ring", "two-level", "all-to-all", "all at once", "permutation", "opposite")
ROUTER_PORTS = 6  # of a host of a torus in three dimensions, which passes on what is not for it


def slowdown(
    router: Router, rounds: Sequence[traffic.Round], place: Ints, policy: str, seeds: Sequence[int] = (0,)
) -> float:
    """Median time over hashes, in that of the same rounds on one switch."""
    ideal = sum(r.times * r.share * np.bincount(r.destinations).max() for r in rounds)
    times = [traffic.collective(router, rounds, place, 1.0, policy, seed).seconds for seed in seeds]
    return statistics.median(times) / float(ideal)


def _plan(pattern: str, hosts: int, fabric: fabrics.Fabric) -> list[traffic.Round]:
    """Rounds of a pattern; "all at once" sends the shifts of an all-to-all in one round instead of in turn."""
    if pattern != "all at once":
        return rounds_of(pattern, hosts, fabric)
    shifts = traffic.all_to_all(hosts)
    sources, destinations = (np.concatenate([getattr(r, end) for r in shifts]) for end in ("sources", "destinations"))
    return [traffic.Round(sources, destinations, shifts[0].share, shifts[0].times)]


def _dollars(fabric: fabrics.Fabric) -> float:
    """Of a host; where hosts pass on what is not for them, the ports of their routers are counted as a switch's."""
    routers = 0.0 if fabric.switches else ROUTER_PORTS * fabrics.PORT_DOLLARS
    return fabrics.bill(fabric).per_host + routers


def compare(hosts: int, layouts: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Every candidate under every traffic and placement: rows with dollars a host and slowdown over one switch.

    A random placement is drawn ``seeds`` times: the median, the least and the most are given; a hash with each.
    """
    rows = []
    for name, (shape, ratio, policy) in tqdm(CANDIDATES.items(), desc="networks", leave=False, disable=None):
        fabric = build(shape, hosts, ratio)
        router, dollars, hashed = Router(fabric), _dollars(fabric), policy in ("ecmp", "valiant")
        for kind in layouts:
            draws = range(seeds) if kind == "random" or hashed else range(1)
            places = [traffic.layout(fabric, kind, seed)[:hosts] for seed in draws]
            for pattern in TRAFFICS:
                plan = _plan(pattern, hosts, fabric)
                slow = [slowdown(router, plan, each, policy, [seed]) for seed, each in zip(draws, places, strict=True)]
                rows.append({
                    "network": name, "dollars": dollars, "layout": kind, "traffic": pattern,
                    "slow": statistics.median(slow), "least": min(slow), "most": max(slow),
                })  # fmt: skip
    return rows


def _partly_shuffled(hosts: int, share: float, seed: int) -> Ints:
    """A packed placement in which a share of the ranks, drawn at random, has changed hosts among itself."""
    rng = np.random.default_rng(seed)
    place = np.arange(hosts)
    chosen = rng.choice(hosts, round(share * hosts), replace=False)
    place[chosen] = place[rng.permutation(chosen)]
    return place


def ring_grid(
    racks: int, per_rack: int, ratios: Sequence[float], shares: Sequence[float], policy: str, seeds: int, *,
    fewer: bool = False,
) -> list[list[float]]:  # fmt: skip
    """Slowdown of a ring over oversubscription [rows] and share of misplaced ranks [columns]: medians of seeds.

    A rack has as many uplinks as hosts, the slower the higher the ratio is; with ``fewer`` they are as fast as a host's
    link, and fewer.
    """
    found = []
    for ratio in tqdm(ratios, desc=policy, leave=False, disable=None):
        spines = round(per_rack / ratio) if fewer else per_rack
        router = Router(fabrics.leaf_spine(racks, per_rack, spines, ratio, parallel=False))
        plan, hosts = traffic.ring(racks * per_rack), racks * per_rack
        found.append([
            statistics.median(
                slowdown(router, plan, _partly_shuffled(hosts, share, seed), policy, [seed]) for seed in range(seeds)
            )
            for share in shares
        ])  # fmt: skip
    return found


def lost(slow: float, share: float) -> float:
    """Share of a step that goes into communication where it would be ``share`` on one switch, nothing overlapped."""
    return slow * share / (slow * share + 1 - share)


def binary_tree(depth: int) -> dict[str, float]:
    """A tree of 2**depth hosts with links of one rate, over a fat one: how many times as long each pattern takes."""
    hosts = 2**depth
    routers = [Router(fabrics.tree(2, depth, fat)) for fat in (False, True)]
    me = np.arange(hosts)
    patterns = {
        "neighbours": [traffic.Round(me, me ^ 1, 1.0)], "ring": traffic.ring(hosts),
        "uniform": traffic.all_to_all(hosts), "permutation": traffic.permutation(hosts),
        "opposite": traffic.opposite(hosts),
    }  # fmt: skip
    found = {}
    for name, rounds in patterns.items():
        thin, fat = (traffic.collective(router, rounds, me, 1.0, "single").seconds for router in routers)
        found[name] = thin / fat
    return found


def crossing_share(depth: int, factor: float) -> float:
    """Share of all flows that must cross the top of a thin binary tree for it to take ``factor`` times as long as the
    flows of neighbours: the top link carries hosts / 2 flows where all cross it."""
    return factor / 2 ** (depth - 1)


def aggregate(ports: Sequence[int], policy: str, seeds: int) -> list[dict[str, float]]:
    """Sum of the max-min fair rates of a random permutation on k-ary fat trees: rows of hosts and rate, in host links;
    means over seeds."""
    rows = []
    for k in tqdm(ports, desc=f"fat trees, {policy}", leave=False, disable=None):
        router = Router(fabrics.fat_tree(k))
        sums = []
        for seed in range(seeds):
            r = traffic.permutation(router.fabric.hosts, seed)[0]
            routes = router.route(r.sources, r.destinations, policy, seed)
            sums.append(float(fluid.max_min(routes, router.fabric.rates).sum()))
        rows.append({"hosts": float(router.fabric.hosts), "rate": statistics.mean(sums)})
    return rows


def growth(rows: Sequence[dict[str, float]]) -> float:
    """Exponent of rate over hosts, from the smallest to the largest network: 1 is linear."""
    first, last = rows[0], rows[-1]
    return float(np.log(last["rate"] / first["rate"]) / np.log(last["hosts"] / first["hosts"]))

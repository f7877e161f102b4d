"""Rules over trees, rings and fat trees."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, Formula, Free, RangeFormula
from tq.book.claims.ledger import COMPUTED, PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part
from tq.systems import hardware, topology
from tq.systems.collectives import Link

CHAPTER = "network-topology"
RANKS = 10_000
LINK = Link(50e9, 5e-6)
LOGARITHM = RANKS / 14  # times as fast as a ring, if rounds were all


def _ring_over_tree(payload_bytes: float) -> float:
    return topology.ring_over_tree(payload_bytes, RANKS, LINK)


def _rounds(ways: int) -> Figure:
    """Of a tree and a ring: one way, or both of an all-reduce."""
    return ways * topology.tree_rounds(RANKS) / 2, ways * topology.ring_rounds(RANKS) / 2


def thousands(claim: Claim, results: Results) -> Finding:
    """Reproduced if a 70B run has 1,000 to 9,999 all-reduces, one per step. A part holds if it has more, because
    thousands are then a lower bound."""
    steps, llama = 1.4e12 / 4e6, 15.6e12 / 16e6
    checks = (
        compare("steps of a 70B run", steps, 1e3, 9999), in_part(compare("the same, as a lower bound", steps, 1e3)),
    )  # fmt: skip
    text = (
        f"A 70B run with four million tokens per step has {steps:,.0f} all-reduces, Llama 3 405B {llama:,.0f} "
        "(computed). Thousands are only a lower bound."
    )
    return found(claim, checks, text, "A run of fewer than ten thousand steps.", "high", "tokens / tokens per step")


def thin_root(claim: Claim, results: Results) -> Finding:
    """Reproduced if a binary tree of 1,024 leaves whose links all have the claimed rate makes some traffic slower than
    a fat tree does, by the model of flows."""
    slow = results(CHAPTER, "tree/opposite")
    text = (
        f"With 10 Gbit/s on every link of a binary tree of 1,024 leaves, half of the leaves share one link at the top: "
        f"traffic that all crosses it takes {slow:.0f} times as long as on a fat tree (computed)."
    )
    checks = (compare("times as long as on a fat tree", slow, 1.1),)
    return found(claim, checks, text, "A switch at the top with more than one such link.", "high", basis=COMPUTED)


def hundredfold(claim: Claim, results: Results) -> Finding:
    """Reproduced if some traffic on the binary tree of 1,024 leaves is computed to take at least the claimed number of
    times as long as on a fat tree of as many."""
    slow = {name: results(CHAPTER, f"tree/{name}") for name in ("opposite", "uniform", "neighbours")}
    load, share = results(CHAPTER, "load/100/constant"), results(CHAPTER, "tree/share-for-100")
    checks = [compare(f"{name} traffic, times as long", value, claim.bounds()[0]) for name, value in slow.items()]
    text = (
        f"Traffic that all crosses the top takes {slow['opposite']:.0f} times as long as on a fat tree, uniform "
        f"traffic {slow['uniform']:.0f}, neighbours {slow['neighbours']:.0f} (computed). A hundredfold needs "
        f"{share:.0%} across the top, or a link at {load:.1%} load."
    )
    return found(claim, checks, text, "The traffic and the rates of the simulated networks.", "medium", basis=COMPUTED)


def linear_growth(claim: Claim, results: Results) -> Finding:
    """Reproduced if the throughput of random permutations on fat trees of 16 to 1,024 hosts grows with hosts to the
    power of at least 0.95 when flows are hashed, as usual. A part holds if it does when they are sprayed."""
    hashed, sprayed = results(CHAPTER, "growth/hashed"), results(CHAPTER, "growth/sprayed")
    each = results(CHAPTER, "growth/hashed-per-host")
    checks = (
        compare("exponent, hashed", hashed, 0.95), in_part(compare("exponent, sprayed", sprayed, 0.95)),
    )  # fmt: skip
    text = (
        f"Throughput of fat trees grows with hosts to the power {sprayed:.2f} when packets are sprayed, {hashed:.2f} "
        f"when flows are hashed (computed). Hashed, 1,024 hosts get {each:.0%} of their links' rate each."
    )
    return found(claim, checks, text, "Throughput of a cluster at several sizes.", "medium", basis=COMPUTED)


RULES: dict[str, Rule] = {
    "S3-010": thin_root,
    "S3-011": hundredfold,
    "S3-012": linear_growth,
    "S3-013": Formula(
        "data sheet of the H100 SXM (data/hardware.csv)",
        lambda: {"NVLink, both directions": 2 * hardware.gpu("h100-80gb").nvlink_bytes_per_s / 1e9},
        "NVIDIA's data sheet prints {0:.0f} GB/s of NVLink per H100, both directions together. No link was measured "
        "here.",
        "A statement that the rate belongs to a node instead of a GPU.", "GB/s", confidence="medium", basis=PRINTED,
    ),
    "S3-014": RangeFormula(
        "bandwidth of a rack's hosts over that of its uplinks (at most 1 in a fat tree)",
        lambda: {
            "16 nodes of 8 x 400G over 16 x 400G": topology.oversubscription(8 * 400, 16, 400, 16),
            "32 such nodes over 8 x 200G": topology.oversubscription(8 * 400, 32, 200, 8),
            "16 nodes of 1 x 400G over 16 x 400G": topology.oversubscription(400, 16, 400, 16),
            "32 nodes of 1 x 400G over 8 x 200G": topology.oversubscription(400, 32, 200, 8),
        },
        "Sixteen nodes of eight 400 Gbit/s ports are computed to send {0:.0f} times what 16 such uplinks carry, 32 "
        "over eight of 200 Gbit/s {1:.0f} times. With one port per node: {2:.0f} and {3:.0f}, in a fat tree 1.",
        "The number and the rate of a node's ports.", "x", claimed=(0.0, 1.0), within=0.0, confidence="medium",
    ),
    "S3-016": Free(
        "time of a ring over that of a tree that halves and doubles, each 2 (n - 1) / n * bytes / 50 GB/s + "
        "rounds * 5 us; 2 (n - 1) rounds in a ring, 2 log2 n in a tree, n = 10,000",
        of=lambda megabytes: _ring_over_tree(1e6 * megabytes), over=(100, 140_000), usual=140_000,
        name="gradient sizes in MB", claimed=(LOGARITHM, LOGARITHM), within=0.2,
        conditions=lambda: {"for 1 MB": _ring_over_tree(1e6)},
        says="For 140 GB of gradients on 10,000 GPUs a ring takes {0:.2f} times as long as a tree that halves "
        "and doubles, of the same bytes (computed). For 1 MB it takes {1:.0f} times, by rounds alone "
        f"{LOGARITHM:.0f}.",
        would_change="Gradients so small that latency is all of their all-reduce.",
    ),
    "S3-017": Formula(
        "rounds in one direction: ceil(log2 n) in a tree, n - 1 in a ring, n = 10,000", lambda: {"one way": _rounds(1)},
        "A tree over 10,000 GPUs is computed to take {0:.0f} rounds in one direction, a ring 9,999. An all-reduce "
        "doubles both counts; rounds decide only its latency.",
        "A step count for both directions of an all-reduce.", "steps", claimed=Claim.ends, within=0.05,
    ),
    "S3-019": thousands,
    "S3-035": Free(
        "round trip through fibre: 2 * distance / 2e8 m/s; 4,000 km lie between the coasts of the United States",
        of=lambda km: 2e3 * 1e3 * km / 2e8, over=(100, 20_000), usual=4000, name="distances in km", unit="ms",
        confidence="low",
        says="Light in fibre alone is computed to take {0:.0f} ms for a round trip over 4,000 km, the claimed time "
        "from about {low:,.0f} km on. Regions are not named; detours and synchronization were not measured.",
        would_change="The regions that are meant, and how often inference synchronizes them.",
    ),
}  # fmt: skip

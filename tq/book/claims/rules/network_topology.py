"""Rules over trees, rings and fat trees."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, Formula, Free, RangeFormula
from tq.book.claims.ledger import PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part
from tq.systems import hardware, topology
from tq.systems.collectives import Link

RANKS = 10_000
LINK = Link(50e9, 5e-6)
LOGARITHM = RANKS / 14  # times as fast as a ring, if rounds were all


def _ring_over_tree(payload_bytes: float) -> float:
    return topology.ring_over_tree(payload_bytes, RANKS, LINK)


def _rounds(ways: int) -> Figure:
    """Of a tree and a ring: one way, or both of an all-reduce."""
    return ways * topology.tree_rounds(RANKS) / 2, ways * topology.ring_rounds(RANKS) / 2


def thousands(claim: Claim, results: Results) -> Finding:
    """One all-reduce a step, a thousand to ten thousand times; in part more often, as thousands are then a bound."""
    steps, llama = 1.4e12 / 4e6, 15.6e12 / 16e6
    checks = (
        compare("steps of a run of 70B", steps, 1e3, 9999), in_part(compare("the same, as a lower bound", steps, 1e3)),
    )  # fmt: skip
    text = (
        f"Says too little: a run of 70B with steps of four million tokens has {steps:,.0f} all-reduces, Llama 3 405B "
        f"{llama:,.0f}."
    )
    return found(claim, checks, text, "A run of less than ten thousand steps.", "high", "tokens / tokens a step")


RULES: dict[str, Rule] = {
    "S3-013": Formula(
        "data sheet of the H100 SXM (data/hardware.csv)",
        lambda: {"NVLink, both directions": 2 * hardware.gpu("h100-80gb").nvlink_bytes_per_s / 1e9},
        "The data sheet prints {0:.0f} GB/s of NVLink for each GPU, both directions together. Printed, not measured "
        "here.",
        "A statement that the rate is of a node instead of a GPU.", "GB/s", confidence="medium", basis=PRINTED,
    ),
    "S3-014": RangeFormula(
        "bandwidth of the hosts over that of the uplinks, at most 1 in a fat tree",
        lambda: {
            "16 nodes of 8 x 400G over 16 x 400G": topology.oversubscription(8 * 400, 16, 400, 16),
            "32 such nodes over 8 x 200G": topology.oversubscription(8 * 400, 32, 200, 8),
        },
        "A rack of 16 nodes with eight ports of 400 Gbit/s each sends {0:.0f} times what its 16 uplinks carry, one of "
        "32 "
        "over eight of 200 {1:.0f} times. A fat tree has 1; nodes of one port would.",
        "A number of ports for each node.", "x", claimed=(0.0, 1.0), within=0.0,
        conditions=lambda: {"16 nodes of one port over 16": topology.oversubscription(400, 16, 400, 16)},
    ),
    "S3-016": Free(
        "2 (n - 1) / n S / B + rounds * 5 us; 2 (n - 1) rounds in a ring, 2 log2 n in a tree, n = 10,000, 50 GB/s",
        of=lambda megabytes: _ring_over_tree(1e6 * megabytes), over=(100, 140_000), usual=140_000,
        name="MB of gradients", claimed=(LOGARITHM, LOGARITHM), within=0.2,
        conditions=lambda: {"for 1 MB": _ring_over_tree(1e6)},
        says="Only rounds fall from n to log n, and decide messages below a megabyte ({1:.0f} times). Gradients of 140 "
        "GB take as long over a ring as over a tree, {0:.2f} times, as both move the same bytes.",
        would_change="Gradients so small that latency is all of their exchange.",
    ),
    "S3-017": Formula(
        "ceil(log2 n) against n - 1", lambda: {"one way": _rounds(1)},
        "A tree over 10,000 GPUs takes {0:.0f} rounds one way and a ring 9,999; an all-reduce twice as many of either. "
        "Rounds decide latency alone.",
        "A number of rounds for both ways of an all-reduce.", "steps", claimed=Claim.ends, within=0.05,
    ),
    "S3-019": thousands,
    "S3-035": RangeFormula(
        "round trip through fibre: 2 * distance / 2e8 m/s",
        lambda: {"5,000 to 20,000 km": (2e3 * 5e6 / 2e8, 2e3 * 2e7 / 2e8)},
        "Light in fibre takes {0:.0f} ms there and back over 5,000 km and 200 over 20,000: regions a continent or half "
        "the earth apart. What synchronisation adds is not measured.",
        "Regions less than 5,000 km apart.", "ms", confidence="low",
    ),
}  # fmt: skip

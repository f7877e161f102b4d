"""Rules over trees, rings and fat trees."""

from __future__ import annotations

from tq.book.claims.formulas import LOOSE, TIGHT, Figure, Formula, RangeFormula
from tq.book.claims.ledger import Claim, Rule
from tq.systems import topology
from tq.systems.collectives import Link

RANKS = 10_000
LINK = Link(50e9, 5e-6)
LOGARITHM = RANKS / 14  # times as fast as a ring, if rounds were all


def _ring_over_tree(payload_bytes: float) -> float:
    return topology.ring_over_tree(payload_bytes, RANKS, LINK)


def _rounds(ways: int) -> Figure:
    """Of a tree and a ring: one way, or both of an all-reduce."""
    return ways * topology.tree_rounds(RANKS) / 2, ways * topology.ring_rounds(RANKS) / 2


RULES: dict[str, Rule] = {
    "S3-014": Formula(
        "bandwidth of the hosts over that of the uplinks",
        lambda: {
            "16 nodes of 8 x 400G over 16 x 400G": topology.oversubscription(8 * 400, 16, 400, 16),
            "32 such nodes over 8 x 200G": topology.oversubscription(8 * 400, 32, 200, 8),
            "16 nodes of one 400G port over 16 x 400G": topology.oversubscription(400, 16, 400, 16),
        }, "x", TIGHT, claimed=1.0, note="A fat tree has 1:1.",
    ),
    "S3-016": Formula(
        "2 (n - 1) / n S / B + rounds * 5 us; 2 (n - 1) rounds in a ring, 2 log2 n in a tree, n = 10,000, 50 GB/s",
        lambda: {"for 140 GB": _ring_over_tree(140e9), "for 1 MB": _ring_over_tree(1e6)}, "x", LOOSE,
        claimed=LOGARITHM, note="Rounds are latency; both move the same bytes.",
    ),
    "S3-017": Formula(
        "ceil(log2 n) against n - 1, each twice for an all-reduce",
        lambda: {"one way": _rounds(1), "for an all-reduce": _rounds(2)}, "steps", TIGHT, claimed=Claim.ends,
        note="Steps decide latency only: tree and ring move the same bytes.",
    ),
    "S3-018": Formula(
        "2 (n - 1) / n S / B + rounds * 5 us", lambda: {"as time of a ring over a tree": _ring_over_tree(140e9)}, "x",
        LOOSE, claimed=LOGARITHM, note="For 140 GB the bytes decide, which are the same.",
    ),
    "S3-019": RangeFormula(
        "tokens / tokens a step",
        lambda: {"for Llama 3 405B, 15.6T in steps of 16M": 15.6e12 / 16e6, "for 1.4T in steps of 4M": 1.4e12 / 4e6},
        "all-reduces", 0.0, claimed=(1e3, 9999.0), note="One a step is the least, so the claim understates.",
    ),
}  # fmt: skip

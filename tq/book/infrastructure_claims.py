"""Rules over the results of `impact-infrastructure`: sites with slow links, pools, and what networks cost."""

from __future__ import annotations

import math

from tq.book.arithmetic import STORED
from tq.book.capacity_claims import Within
from tq.book.ledger import NOT_CHECKABLE, NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Facts, Finding, NotRecorded, Rule

SITES, SHAPED = "impact-infrastructure", "data-parallel-training"
FEASIBLE = 0.5  # below it two sites are worth less than one
LEASED_GBIT = 10.0  # a line between sites that is no matter of course, and can be had
SCENARIOS = {  # key -> (words, the link that it is judged at)
    "hybrid": ("cloud-hybrid at 10 Gbit/s", 10_000),
    "pool": ("a pool at 100 Gbit/s a node", 100_000),
    "edge": ("the edge at 100 Mbit/s", 100),
}


def _graded(whole: bool, part: bool) -> str:
    return REPRODUCED if whole else PARTLY if part else NOT_REPRODUCED


def _shaped(facts: Facts) -> str:
    """What shaped links said, where they were recorded."""
    try:
        rare, flat = (facts(SHAPED, f"sites/sooner/{m}") for m in ("diloco-32-4", "ddp-4"))
        gap = facts(SHAPED, "gap/diloco")
    except NotRecorded:
        return "between shaped links it is not measured"
    text = (
        f"measured between two sites with 10 Mbit/s at a million parameters: {flat:.1f} times sooner to the same loss "
    )
    return text + f"with four bits every step, {rare:.0f} times with DiLoCo and four bits, at a gap of {gap:+.3f} nats"


def several_sites(claim: Claim, facts: Facts) -> Finding:
    """Two statements. Impossible: no method without codes is feasible on a leased line, and no run is published.
    Feasible by codes: an exchange every step needs a link at four bits that at bf16 is too slow, of at most 100 Gbit/s.
    """
    need = {m: facts(SITES, f"need/datacenters/{m}/50") for m in ("bf16", "4-bits", "diloco-bf16", "diloco-4")}
    published = facts(SITES, "intellect/use/lowest")
    impossible = need["diloco-bf16"] > LEASED_GBIT and published < FEASIBLE
    helps = need["4-bits"] < 0.8 * need["bf16"] and need["4-bits"] <= 100
    text = f"it was done before: ten billion parameters on three continents at {published:.0%} of use and more. For "
    text += (
        f"70B at two sites of 128 H100 an exchange every step is feasible from {need['bf16']:.0f} Gbit/s in bf16 and "
    )
    text += f"from {need['4-bits']:.0f} with four bits, so codes decide between the two; every hundred steps it needs "
    text += f"{need['diloco-bf16']:.2f} without codes and {need['diloco-4']:.2f} with them; {_shaped(facts)}"
    change = "Another meaning of feasible than half of the time computing; a loss of DiLoCo that does not hold up."
    verdict = _graded(impossible and helps, helps)
    return Finding(verdict, text, change, "medium", "T = c + (2 (k - 1) / k N b / R) / H")


def become_practical(claim: Claim, facts: Facts) -> Finding:
    """Each scenario is infeasible without codes and feasible with them, every step; in part if one is, or by DiLoCo."""
    flips, rare, shown = [], [], []
    for name, (words, mbit) in SCENARIOS.items():
        plain = facts(SITES, f"use/{name}/{'fp32' if name == 'pool' else 'bf16'}/{mbit}")
        coded = facts(SITES, f"use/{name}/4-bits/{mbit}")
        flips.append(plain < FEASIBLE <= coded)
        text = f"{words} {plain:.0%} to {coded:.0%}"
        if name != "pool":
            before, after = (facts(SITES, f"use/{name}/diloco-{m}/{mbit}") for m in ("bf16", "4"))
            rare.append(before < FEASIBLE <= after)
            text += f" ({before:.0%} to {after:.0%} if they agree every hundred steps)"
        shown.append(text)
    text = f"time in which GPUs compute, without and with four bits: {'; '.join(shown)}"
    change = "Another link, another model, or another limit than half of the time."
    return Finding(_graded(all(flips), any([*flips, *rare])), text, change, "medium", "u = c / T")


def infiniband_cost(claim: Claim, facts: Facts) -> Finding:
    """Between the found figures, to a tenth; in part up to a quarter above."""
    low, high = (facts(SITES, f"cost/infiniband/{end}") for end in ("lowest", "highest"))
    claimed = claim.number()
    text = f"for 1,000 GPUs a bill of switches and cables gives {low:.1f} million dollars, the interconnect's share of "
    text += f"amortised cost {high:.1f} at most, of {facts(SITES, 'cost/cluster'):.0f} million for everything"
    verdict = _graded(0.9 * low <= claimed <= 1.1 * high, 0.9 * low <= claimed <= 1.25 * high)
    return Finding(verdict, text, "A bill with network cards, optics and labour.", "low", "chip price * 17 / 44")


def ethernet_cost(claim: Claim, facts: Facts) -> Finding:
    """No bill for Ethernet was found; what is known bounds nothing."""
    text = (
        "source not found: no bill for Ethernet beside one for InfiniBand at equal speed; one for InfiniBand, without "
    )
    text += "network cards, is lower than the claimed price of Ethernet"
    return Finding(NOT_CHECKABLE, text, "A dated bill of materials for 1,000 GPUs.")


def mandatory(claim: Claim, facts: Facts) -> Finding:
    """Mandatory: Ethernet at the highest rate of the chapter leaves the pool infeasible. Twice: 15 over 7."""
    use, ratio = facts(SITES, "use/pool/fp32/400000"), facts(SITES, "cost/ratio")
    needed, twice = use < FEASIBLE, abs(ratio - claim.number()) <= 0.1 * claim.number()
    text = (
        f"the paper's own prices have a ratio of {ratio:.2f}; mandatory it is not: with a port of 400 Gbit/s for eight "
    )
    text += f"GPUs and no codes the model computes {use:.0%} of the time, whatever the port is called"
    return Finding(
        _graded(needed and twice, needed or twice), text, "A step that RoCE cannot carry.", "medium", "15 / 7"
    )


def network_saving(claim: Claim, facts: Facts) -> Finding:
    """No more can be saved than the fabric costs: by every figure that was found, or by the highest."""
    low, high = (facts(SITES, f"cost/infiniband/{end}") for end in ("lowest", "highest"))
    claimed, cluster = claim.number(), facts(SITES, "cost/cluster")
    text = (
        f"15 - 7 = 8 million, {claimed / cluster:.0%} of a cluster of {cluster:.0f}; the fabric that is left out costs "
    )
    text += f"{low:.1f} to {high:.1f} million, so it holds only by the higher figure and with Ethernet at no more than "
    text += f"{max(0.0, high - claimed):.1f}"
    return Finding(_graded(low >= claimed, high >= claimed), text, "Two bills at equal speed.", "low", "15 - 7")


SUMS = {
    "S0-006": Within(
        "effective rate of 100G over that of 400G",
        lambda: {
            "when only Ethernet codes an fp32 payload": 100 * 32 / STORED / 400,
            "a bf16 payload": 100 * 16 / STORED / 400, "when both code": 0.25,
        }, "x", claimed=(1.0, math.inf),
        note="Payload of data parallelism alone; tensor and pipeline traffic keeps the raw rate.",
    ),
}  # fmt: skip


RULES: dict[str, Rule] = {
    "S0-041": several_sites,
    "S0-042": become_practical,
    "S0-004": infiniband_cost,
    "S0-005": ethernet_cost,
    "S0-015": mandatory,
    "S0-016": network_saving,
    **SUMS,
}

"""Rules over sites with slow links and pools."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for

CHAPTER, SHAPED = "impact-infrastructure", "data-parallel-training"
FEASIBLE = 0.5  # below it two sites are worth less than one
LEASED_GBIT = 10.0  # a line between sites that is no matter of course, and can be had
SCENARIOS = {  # key -> (words, the link that it is judged at)
    "hybrid": ("cloud-hybrid at 10 Gbit/s", 10_000),
    "pool": ("a pool at 100 Gbit/s a node", 100_000),
    "edge": ("the edge at 100 Mbit/s", 100),
}


def _shaped(results: Results) -> str:
    """What shaped links said, where they were recorded."""
    found = results.if_recorded(SHAPED, "sites/sooner/diloco-32-4", "sites/sooner/ddp-4", "gap/diloco")
    if found is None:
        return "between shaped links it is not measured"
    rare, flat, gap = found
    return (
        f"measured between two sites with 10 Mbit/s at a million parameters: {flat:.1f} times sooner to the same loss "
        f"with four bits every step, {rare:.0f} times with DiLoCo and four bits, which ends {gap:+.3f} nats from the "
        "plain run after twice its steps"
    )


def several_sites(claim: Claim, results: Results) -> Finding:
    """Impossible: no method without codes is feasible on a leased line, and no run is published; and codes of every
    step make it feasible there. In part if the latter alone holds."""
    need = {m: results(CHAPTER, f"need/datacenters/{m}/50") for m in ("bf16", "4-bits", "diloco-bf16", "diloco-4")}
    published = results(CHAPTER, "intellect/use/lowest")
    impossible = need["diloco-bf16"] > LEASED_GBIT and published < FEASIBLE
    helps = need["4-bits"] <= LEASED_GBIT < need["bf16"]
    text = (
        f"possible before: ten billion parameters on three continents at {published:.0%} of use or more. For "
        f"70B at two sites of 128 H100 an exchange every step is feasible from {need['bf16']:.0f} Gbit/s in bf16 and "
        f"from {need['4-bits']:.0f} with four bits, so codes decide between the two; every hundred steps it needs "
        f"{need['diloco-bf16']:.2f} without codes and {need['diloco-4']:.2f} with them; {_shaped(results)}"
    )
    change = "Another meaning of feasible than half of the time computing; a loss of DiLoCo that does not hold up."
    verdict = verdict_for(impossible and helps, helps)
    return Finding(verdict, text, change, "medium", "T = c + (2 (k - 1) / k N b / R) / H")


def become_practical(claim: Claim, results: Results) -> Finding:
    """Each scenario is infeasible without codes and feasible with them, every step; in part if one is, or by DiLoCo."""
    flips, rare, shown = [], [], []
    for name, (words, mbit) in SCENARIOS.items():
        plain = results(CHAPTER, f"use/{name}/{'fp32' if name == 'pool' else 'bf16'}/{mbit}")
        coded = results(CHAPTER, f"use/{name}/4-bits/{mbit}")
        flips.append(plain < FEASIBLE <= coded)
        text = f"{words} {plain:.0%} to {coded:.0%}"
        if name != "pool":
            before, after = (results(CHAPTER, f"use/{name}/diloco-{m}/{mbit}") for m in ("bf16", "4"))
            rare.append(before < FEASIBLE <= after)
            text += f" ({before:.0%} to {after:.0%} if they agree every hundred steps)"
        shown.append(text)
    text = f"time in which GPUs compute, without and with four bits: {'; '.join(shown)}"
    change = "Another link, another model, or another limit than half of the time."
    return Finding(verdict_for(all(flips), any([*flips, *rare])), text, change, "medium", "u = c / T")


RULES: dict[str, Rule] = {"S0-041": several_sites, "S0-042": become_practical}

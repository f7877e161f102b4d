"""Rules over sites with slow links and pools."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check

CHAPTER = "impact-infrastructure"
FEASIBLE = 0.5  # below it two sites are worth less than one
LEASED_GBIT = 10.0  # a line between sites that is no matter of course, and can be had
SCENARIOS = {  # key -> (words, the link that it is judged at in Mbit/s); edge-cloud is under consideration only
    "hybrid": ("cloud-hybrid at 10 Gbit/s", 10_000),
    "pool": ("a pool at 100 Gbit/s a node", 100_000),
}


def several_sites(claim: Claim, results: Results) -> Finding:
    """Impossible without codes: no published run, and no method that is feasible on a leased line. Feasible with them:
    an exchange every step on that line."""
    need = {m: results(CHAPTER, f"need/datacenters/{m}/50") for m in ("bf16", "4-bits", "diloco-bf16", "diloco-4")}
    published = results(CHAPTER, "intellect/use/lowest")
    checks = (
        Check(f"a published run across sites computes {published:.0%} of the time, needed less than half",
              published < FEASIBLE),
        Check(f"every hundred steps in bf16 needs {need['diloco-bf16']:.2f} Gbit/s, needed more than {LEASED_GBIT:.0f}",
              need["diloco-bf16"] > LEASED_GBIT),
        Check(f"every step with four bits needs {need['4-bits']:.0f} Gbit/s, needed at most {LEASED_GBIT:.0f}",
              need["4-bits"] <= LEASED_GBIT),
    )  # fmt: skip
    text = (
        f"Possible before: ten billion parameters on three continents computed {published:.0%} of the time or more. "
        "70B at "
        f"two sites needs {need['bf16']:.0f} Gbit/s every step in bf16, {need['4-bits']:.0f} with four bits, "
        f"{need['diloco-bf16']:.2f} every hundred steps."
    )
    change = "A definition of multi-datacenter training that leaves out what was published."
    return found(claim, checks, text, change, "medium", "T = c + (2 (k - 1) / k N b / R) / H")


def become_practical(claim: Claim, results: Results) -> Finding:
    """Cloud-hybrid and the pool compute less than half of the time without codes and more with them, every step."""
    checks, shown = [], []
    for name, (words, mbit) in SCENARIOS.items():
        plain = results(CHAPTER, f"use/{name}/{'fp32' if name == 'pool' else 'bf16'}/{mbit}")
        coded = results(CHAPTER, f"use/{name}/4-bits/{mbit}")
        text = f"{words} {plain:.0%} to {coded:.0%}"
        checks.append(Check(f"{text}, needed across a half", plain < FEASIBLE <= coded))
        shown.append(text)
    rare = results(CHAPTER, f"use/hybrid/diloco-bf16/{SCENARIOS['hybrid'][1]}")
    text = (
        f"GPUs compute, without and with four bits: {'; '.join(shown)}. Agreeing every hundred steps makes "
        "cloud-hybrid "
        f"practical without codes, {rare:.0%}. Edge-cloud is only under consideration."
    )
    change = "Another link between cloud and own cluster, or another limit than a half."
    return found(claim, checks, text, change, "medium", "u = c / T")


RULES: dict[str, Rule] = {"S0-041": several_sites, "S0-042": become_practical}

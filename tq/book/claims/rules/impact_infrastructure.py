"""Rules over sites with slow links and pools."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check

CHAPTER = "impact-infrastructure"
FEASIBLE = 0.5  # below it two sites are worth less than one
LEASED_GBIT = 10.0  # a line between sites that is no matter of course, and can be had
SCENARIOS = {  # key -> (words, the link that it is judged at in Mbit/s); edge-cloud is under consideration only
    "hybrid": ("cloud-hybrid, 10 Gbit/s", 10_000),
    "pool": ("the pool, 100 Gbit/s", 100_000),
}


def several_sites(claim: Claim, results: Results) -> Finding:
    """Reproduced if training at several sites was impossible and 4-bit gradients make it feasible. Impossible means
    that no published run, by whatever method, computes half of the time, and that even a bf16 sync every hundred steps
    needs more than a leased line of 10 Gbit/s. Feasible means that a 4-bit sync every step needs no more than that
    line."""
    need = {m: results(CHAPTER, f"need/datacenters/{m}/50") for m in ("bf16", "4-bits", "diloco-bf16", "diloco-4")}
    published = results(CHAPTER, "intellect/use/lowest")
    checks = (
        Check(f"a published run across sites computes {published:.0%} of the time (required: less than half)",
              published < FEASIBLE),
        Check(f"Gbit/s of a bf16 sync per hundred steps: {need['diloco-bf16']:.2f} (required: over {LEASED_GBIT:.0f})",
              need["diloco-bf16"] > LEASED_GBIT),
        Check(f"a 4-bit sync every step needs {need['4-bits']:.0f} Gbit/s (required: at most {LEASED_GBIT:.0f})",
              need["4-bits"] <= LEASED_GBIT),
    )  # fmt: skip
    text = (
        f"A 10B run on three continents, with rare int8 syncs, computed at least {published:.0%} of the "
        f"time. 70B at two sites is modelled to need {need['bf16']:.0f} Gbit/s in bf16, "
        f"{need['4-bits']:.0f} in 4 bits, {need['diloco-bf16']:.2f} with rare bf16 syncs."
    )
    change = "A definition of multi-datacenter training that excludes the published runs."
    return found(claim, checks, text, change, "medium", "T = c + (2 (k - 1) / k N b / R) / H")


def become_practical(claim: Claim, results: Results) -> Finding:
    """Reproduced if cloud-hybrid and the pool compute less than half of the time with fp32 gradients, and half or more
    with a 4-bit sync every step. A part holds if one of them does."""
    checks, shown = [], []
    for name, (words, mbit) in SCENARIOS.items():
        plain = results(CHAPTER, f"use/{name}/fp32/{mbit}")
        coded = results(CHAPTER, f"use/{name}/4-bits/{mbit}")
        checks.append(Check(f"{words}: computes {plain:.0%} of the time without and {coded:.0%} with compression "
                            "(required: less than half, and half or more)", plain < FEASIBLE <= coded))  # fmt: skip
        shown.append(f"{plain:.0%} to {coded:.0%} ({words})")
    rare = results(CHAPTER, f"use/hybrid/diloco-bf16/{SCENARIOS['hybrid'][1]}")
    text = (
        f"Against fp32, 4-bit gradients raise the modelled compute share from {', from '.join(shown)}. With a bf16 "
        f"sync per hundred steps, cloud-hybrid has {rare:.0%}; edge-cloud is only under consideration."
    )
    change = "Another link between cloud and own cluster, or another limit than half of the time."
    return found(claim, checks, text, change, "medium", "u = c / T")


RULES: dict[str, Rule] = {"S0-041": several_sites, "S0-042": become_practical}

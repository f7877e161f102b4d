"""Rules over watts, watt-hours, dollars and carbon. Only metered totals could check them."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, RangeFormula
from tq.book.claims.ledger import UNDECIDED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part, shown
from tq.economics import energy as watts
from tq.systems import hardware

CHAPTER = "energy"
GENERATIONS = ("v100-32gb", "a100-80gb", "h100-80gb", "b200-192gb")
MILLIONS = 2.0  # of tonnes, from which on one says millions
MANY = 100  # clusters of 100,000 H100, above which a total counts as out of reach


def _ends(results: Results, key: str) -> tuple[float, float]:
    entry = results.entry(CHAPTER, key)
    return float(entry.get("low", entry["value"])), float(entry.get("high", entry["value"]))


def network_power(claim: Claim, results: Results) -> Finding:
    """Reproduced if the whole network, the most that can be saved, is at least the claimed share of the power by every
    figure that was found. A part holds if it is so by the widest count."""
    least = claim.bounds()[0] / 100
    low, high, wide = (results(CHAPTER, f"network/{end}") for end in ("lowest", "highest", "with-storage"))
    checks = (
        compare("the network's share of the IT power, lowest figure", low, least),
        in_part(compare("the same, highest figure with storage", max(high, wide), least)),
    )
    text = (
        f"All switches, optics and network cards are computed to draw {low:.1%} to {high:.1%} of a cluster's IT power. "
        f"With storage the widest count has about {wide:.0%}, and Ethernet switches draw power too."
    )
    change = "A power meter on a cluster before and after its InfiniBand switches were removed."
    return found(claim, checks, text, change, "medium", "network / (1 + network)")


def cluster_power(claim: Claim, results: Results) -> Finding:
    """Reproduced if 100,000 H100 draw the claimed power at the rating of their nodes, network and building included. A
    part holds if they do in training."""
    rated = results(CHAPTER, "cluster/rated")
    low, high = results(CHAPTER, "cluster/low"), results(CHAPTER, "cluster/high")
    least, most = claim.bounds()
    checks = (
        compare("MW at the rating of the nodes", rated, least, most),
        Check(f"MW in training {low:.0f} to {high:.0f}, must overlap {least:.0f} to {most:.0f}",
              low <= most and least <= high, True),
    )  # fmt: skip
    text = (
        f"100,000 H100 with network and building are modelled to draw {rated:.0f} MW at the rating of their nodes and "
        f"{low:.0f} to {high:.0f} MW in training. No site of this size was metered."
    )
    change = "A power meter on a site with 100,000 H100."
    return found(claim, checks, text, change, "medium", "GPUs / 8 * node power * load * (1 + network) * PUE")


def gpt3_energy(claim: Claim, results: Results) -> Finding:
    """Reproduced if the hours, watts and PUE of the published estimate come to the claimed energy. The estimate is not
    a metered total."""
    computed = results(CHAPTER, "gpt3/computed") / 1000
    text = (
        f"Patterson et al. estimate 14.8 days of an assumed 10,000 V100 at 330 W and a PUE of 1.1, which is computed "
        f"to be {computed:.2f} GWh. The 330 W were metered on another system; the run itself was not metered."
    )
    checks = (compare("GWh by the published estimate", computed, *claim.bounds()),)
    return found(claim, checks, text, "A metered energy total of the GPT-3 run.", "medium", "hours * 330 W * 1.1")


def gpt3_bill(claim: Claim, results: Results) -> Finding:
    """Reproduced if the published energy costs the claimed sum at the mean industrial price of the United States."""
    usd, implied = results(CHAPTER, "gpt3/usd"), results(CHAPTER, "gpt3/implied")
    text = (
        f"The published 1,287 MWh are computed to cost ${usd / 1e3:,.0f}K at the mean industrial price of the United "
        f"States. The claimed $200K need ${implied:.3f} per kWh."
    )
    checks = (compare("dollars at the industrial price", usd, *claim.bounds()),)
    change = "The price of electricity at the site where GPT-3 was trained."
    return found(claim, checks, text, change, "low", "1,287 MWh * price")


def frontier_energy(claim: Claim, results: Results) -> Finding:
    """Reproduced if both ends of the modelled energy of Llama 3.1 405B, whose hours are published, lie in the claimed
    range. A part holds if one does, or if both ends of the document's own run of 25,000 H100 over 100 days do."""
    low, high = claim.bounds()
    published, own = (_ends(results, f"frontier/{run}") for run in ("llama31-405b", "gpt4-class"))
    checks = [compare("GWh for Llama 3.1 405B", end, low, high) for end in published]
    text = f"GWh for the document's own run {shown(own[0])} to {shown(own[1])}, both in {shown(low)} to {shown(high)}"
    checks.append(Check(text, low <= own[0] and own[1] <= high, True))
    text = (
        f"Llama 3.1 405B, of 2024, is modelled to have taken {published[0]:.0f} to {published[1]:.0f} GWh, and the "
        f"document's own 25,000 H100 over 100 days {own[0]:.0f} to {own[1]:.0f}. The power of the nodes was metered on "
        "other systems."
    )
    return found(claim, checks, text, "Metered energy totals of frontier runs.", "medium", "hours * watts")


def industry_carbon(claim: Claim, results: Results) -> Finding:
    """Reproduced if one cluster of 100,000 H100 alone emits two million tonnes of CO2 or more per year, not reproduced
    if that takes more than a hundred of them. In between it is undecided, because how many such clusters train is not
    published."""
    cluster = results(CHAPTER, "carbon/cluster")
    checks = (compare("million tonnes per year from one cluster of 100,000 H100", cluster, MILLIONS),)
    text = (
        f"One cluster of 100,000 H100 is modelled to emit {cluster:.2f} million tonnes of CO2 per year on the world's "
        f"mean grid, so {MILLIONS:.0f} million take {MILLIONS / cluster:.1f} such clusters. How many train is not "
        "published; the total was never metered."
    )
    change, formula = "A metered energy total of frontier training.", "MW * 8760 h * kg/kWh"
    if MILLIONS / MANY <= cluster < MILLIONS:
        return Finding(UNDECIDED, text, change, "low", formula, checks=checks)
    return found(claim, checks, text, change, "low", formula)


def _million() -> dict[str, Figure]:
    """GW of a million GPUs at the rating of their nodes, with network and building."""
    network, pue = watts.factors()["network_share"].mid, watts.factors()["pue"].mid
    return {
        f"of {gpu.split('-')[0].upper()}": 1e6 * watts.power(gpu).rated_w * (1 + network) * pue / 1e9
        for gpu in GENERATIONS[2:]
    }


def _efficiency() -> dict[str, Figure]:
    """Smallest step of 16-bit operations per joule from one generation to the next."""
    card = [hardware.gpu(gpu).peak_flops / hardware.gpu(gpu).tdp_w for gpu in GENERATIONS]
    node = [hardware.gpu(gpu).peak_flops / watts.power(gpu).rated_w for gpu in GENERATIONS[1:]]
    steps = {
        name: [new / old for old, new in zip(rates, rates[1:], strict=False)]
        for name, rates in (("cards from V100 to B200", card), ("nodes from A100 to B200", node))
    }
    return {f"smallest step, {name}": min(found) for name, found in steps.items()}


RULES: dict[str, Rule] = {
    "S0-055": network_power,
    "S4-043": cluster_power,
    "S4-091": gpt3_energy,
    "S4-092": gpt3_bill,
    "S4-093": frontier_energy,
    "S4-098": industry_carbon,
    "S4-113": RangeFormula(
        "a million GPUs * rated power of the node per GPU * (1 + network) * PUE; several are two or more", _million,
        "At the rating of their nodes a million H100 are computed to draw {0:.1f} GW, a million B200 {1:.1f} GW, "
        "network and building included. In training a node draws about three quarters of its rating.",
        "The type of GPU of such a site, or its contract for power.", "GW", claimed=(2.0, 1e9), within=0.0,
        confidence="medium",
    ),
    "S4-157": RangeFormula(
        "dense 16-bit peak / power, of each generation over the one before", _efficiency,
        "By data sheets operations per joule grow {0:.2f}-fold or more with each generation from V100 to B200, by "
        "rated nodes {1:.2f}-fold from A100 on. Metered efficiency in training was not compared.",
        "A generation of GPU with fewer operations per joule than the last.", "x", claimed=(1.05, 1e9), within=0.0,
        confidence="medium",
    ),
}

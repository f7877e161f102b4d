"""Rules over watts, watt-hours, dollars and carbon. Metered totals alone check them."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

CHAPTER = "energy"


def _ends(results: Results, key: str) -> tuple[float, float]:
    entry = results.entry(CHAPTER, key)
    return float(entry.get("low", entry["value"])), float(entry.get("high", entry["value"]))


def network_power(claim: Claim, results: Results) -> Finding:
    """All of the network, the most that can be saved, is at least the claimed share by every figure; in part by the
    widest count."""
    least = claim.bounds()[0] / 100
    low, high, wide = (results(CHAPTER, f"network/{end}") for end in ("lowest", "highest", "with-storage"))
    checks = (
        compare("share of the network, lowest figure", low, least),
        in_part(compare("highest figure, storage included", max(high, wide), least)),
    )
    text = (
        f"All switches, optics and cards together take {low:.1%} to {high:.1%} of the IT power, about {wide:.0%} with "
        "storage in the widest count that was found; Ethernet switches draw power too."
    )
    change = "A metered cluster before and after its InfiniBand switches went."
    return found(claim, checks, text, change, "medium", "network / (1 + network)")


def cluster_power(claim: Claim, results: Results) -> Finding:
    """At the nodes' rating, network and building included, as claimed; in part if it is so in training."""
    rated = results(CHAPTER, "cluster/rated")
    low, high = results(CHAPTER, "cluster/low"), results(CHAPTER, "cluster/high")
    least, most = claim.bounds()
    checks = (
        compare("MW by the rating of the nodes", rated, least, most),
        Check(f"MW in training {low:.0f} to {high:.0f}, needed some of {least:.0f} to {most:.0f}",
              low <= most and least <= high, True),
    )  # fmt: skip
    text = (
        f"At full utilization, as the nodes are rated, 100,000 H100 take {rated:.0f} MW with network and building; in "
        f"training {low:.0f} to {high:.0f}. No such site was metered."
    )
    change = "The meter of a site with 100,000 H100."
    return found(claim, checks, text, change, "medium", "GPUs * node / 8 * load * (1 + network) * PUE")


def gpt3_energy(claim: Claim, results: Results) -> Finding:
    """The published estimate comes to what is claimed. It is no metered total."""
    computed = results(CHAPTER, "gpt3/computed") / 1000
    text = (
        f"Patterson et al. compute {computed:.2f} GWh from 330 W a V100, metered on another system, 10,000 GPUs, which "
        "they assume, and 14.8 days. The run itself was not metered."
    )
    checks = (compare("GWh as published", computed, *claim.bounds()),)
    return found(claim, checks, text, "A meter of GPT-3's run.", "medium", "hours * 330 W * 1.1")


def gpt3_bill(claim: Claim, results: Results) -> Finding:
    """The published energy at the mean industrial price comes to what is claimed."""
    usd, implied = results(CHAPTER, "gpt3/usd"), results(CHAPTER, "gpt3/implied")
    text = (
        f"1,287 MWh cost {usd:,.0f} dollars at the mean industrial price of the United States; 200,000 need "
        f"{implied:.3f} dollars a kWh."
    )
    checks = (compare("dollars at the industrial price", usd, *claim.bounds()),)
    return found(claim, checks, text, "The price of electricity at the site of GPT-3.", "low", "1,287 MWh * price")


def frontier_energy(claim: Claim, results: Results) -> Finding:
    """Two published or reported runs lie in the claimed range with all their watts; in part if one meets it."""
    low, high = claim.bounds()
    high = max(high, 1e9) if claim.value.endswith("+") else high
    runs = {"25,000 H100 for 100 days": "gpt4-class", "the hours of Llama 3.1 405B": "llama31-405b"}
    ends = {name: _ends(results, f"frontier/{key}") for name, key in runs.items()}
    checks = [compare(f"GWh of {name}", end, low, high) for name, pair in ends.items() for end in pair]
    text = " and ".join(f"{name} take {a:.0f} to {b:.0f} GWh" for name, (a, b) in ends.items())
    text = text[0].upper() + text[1:] + ", by node power metered on other systems."
    return found(claim, checks, text, "Metered totals of frontier runs.", "medium", "hours * W")


def industry_carbon(claim: Claim, results: Results) -> Finding:
    """Two million tonnes or more from the clusters that are known; one of 100,000 GPUs counts in part from a tenth of
    that on."""
    cluster, megawatts = results(CHAPTER, "carbon/cluster"), results(CHAPTER, "carbon/mw-for-a-megatonne")
    checks = (
        compare("million tonnes of one cluster of 100,000 H100", cluster, 2.0),
        in_part(compare("the same, as an order of magnitude", cluster, 0.2)),
    )
    text = (
        f"As an order: one cluster of 100,000 H100 emits {cluster:.2f} million tonnes a year on the world's mean grid, "
        f"and a million is {megawatts:.0f} MW all year. What the industry trains was metered by nobody."
    )
    return found(claim, checks, text, "Totals of what the industry trains.", "low", "MW * 8760 h * kg/kWh")


RULES: dict[str, Rule] = {
    "S0-055": network_power,
    "S4-043": cluster_power,
    "S4-091": gpt3_energy,
    "S4-092": gpt3_bill,
    "S4-093": frontier_energy,
    "S4-098": industry_carbon,
}

"""Rules over watts, watt-hours, dollars and carbon. Metered totals alone check them."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for

CHAPTER = "energy"
GUARDED = "Metered totals of more runs."


def _ends(results: Results, key: str) -> tuple[float, float]:
    entry = results.entry(CHAPTER, key)
    return float(entry.get("low", entry["value"])), float(entry.get("high", entry["value"]))


def network_power(claim: Claim, results: Results) -> Finding:
    """All of the network is the most that can be saved: at least the low end by every figure, in part by the widest."""
    low = claim.ends()[0] / 100
    least, most, wide = (results(CHAPTER, f"network/{end}") for end in ("lowest", "highest", "with-storage"))
    text = (
        f"all switches, optics and cards take {least:.1%} to {most:.1%} of the IT power, with storage about {wide:.0%} "
        "in the widest count that was found, and Ethernet switches draw power too"
    )
    verdict = verdict_for(least >= low, max(most, wide) >= low)
    return Finding(verdict, text, "A metered cluster before and after.", "medium", "network / (1 + network)")


def cluster_power(claim: Claim, results: Results) -> Finding:
    """At its ratings and in training, within a tenth; in part if one of the two is."""
    claimed, rated = claim.number(), results(CHAPTER, "cluster/rated")
    low, high = results(CHAPTER, "cluster/low"), results(CHAPTER, "cluster/high")
    by_rating = abs(rated / claimed - 1) <= 0.1
    training = 0.9 * low <= claimed <= 1.1 * high
    text = (
        f"{rated:.0f} MW by the rating of the nodes, network and building included; in training {low:.0f} to {high:.0f}"
    )
    verdict = verdict_for(by_rating and training, by_rating or training)
    return Finding(verdict, text, "The meter of such a site.", "medium", "GPUs * node / 8 * load * (1 + network) * PUE")


def gpt3_energy(claim: Claim, results: Results) -> Finding:
    """The source's own product, within a tenth; it rests on an assumed number of GPUs, so it is no metered total."""
    claimed, computed = claim.number() * 1000, results(CHAPTER, "gpt3/computed")
    near = abs(computed / claimed - 1)
    text = (
        f"{computed:,.0f} MWh as Patterson et al. compute it: 330 W a V100 metered on another system, 10,000 of them "
        "assumed, 14.8 days; the run itself was not metered"
    )
    return Finding(verdict_for(near <= 0.1, near <= 0.5), text, "A meter of that run.", "medium", "hours * 330 W * 1.1")


def gpt3_bill(claim: Claim, results: Results) -> Finding:
    """At the industrial price, within a tenth; in part within a factor of two."""
    claimed = claim.number() * (1000 if "K" in claim.value else 1)
    usd, implied = results(CHAPTER, "gpt3/usd"), results(CHAPTER, "gpt3/implied")
    text = (
        f"{usd:,.0f} dollars at the mean industrial price of the United States; the claim needs "
        f"{implied:.3f} dollars a kWh"
    )
    verdict = verdict_for(abs(usd / claimed - 1) <= 0.1, 0.5 <= usd / claimed <= 2)
    return Finding(verdict, text, "The price that the site paid.", "low", "1,287 MWh * price")


def frontier_energy(claim: Claim, results: Results) -> Finding:
    """Both runs inside the range, each with its interval of watts; in part if an interval meets it."""
    low, high = claim.ends()
    high = max(high, 1e9) if claim.value.endswith("+") else high
    runs = {"25,000 H100 for 100 days": "gpt4-class", "the hours of Llama 3.1 405B": "llama31-405b"}
    ends = {name: _ends(results, f"frontier/{key}") for name, key in runs.items()}
    inside = [low <= a and b <= high for a, b in ends.values()]
    meets = [b >= low and a <= high for a, b in ends.values()]
    text = "; ".join(f"{name} take {a:.0f} to {b:.0f} GWh" for name, (a, b) in ends.items())
    return Finding(verdict_for(all(inside), any(meets)), text, GUARDED, "medium", "hours * W")


def industry_carbon(claim: Claim, results: Results) -> Finding:
    """One cluster of 100,000 GPUs makes half of a million tonnes a year; in part a tenth: an order of magnitude."""
    cluster, megawatts = results(CHAPTER, "carbon/cluster"), results(CHAPTER, "carbon/mw-for-a-megatonne")
    text = (
        f"plausible as an order: a million tonnes a year on the world's mean grid is {megawatts:.0f} MW all year, and "
        f"one cluster of 100,000 H100 emits {cluster:.2f} million; what the industry trains was metered by nobody"
    )
    verdict = verdict_for(cluster >= 0.5, cluster >= 0.1)
    return Finding(verdict, text, "Totals of the industry.", "low", "MW * 8760 h * kg/kWh")


RULES: dict[str, Rule] = {
    "S0-055": network_power,
    "S4-043": cluster_power,
    "S4-091": gpt3_energy,
    "S4-092": gpt3_bill,
    "S4-093": frontier_energy,
    "S4-098": industry_carbon,
}

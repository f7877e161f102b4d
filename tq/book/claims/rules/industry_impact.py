"""Rules over what providers, startups and laboratories would save."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, Formula
from tq.book.claims.ledger import PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part
from tq.systems import Transformer

CHAPTER = "industry-impact"
PRICED = "400g"  # ports of the H100 that can be rented


def cheaper_cluster(claim: Claim, results: Results) -> Finding:
    """By the whitepaper's own prices Ethernet makes a cluster cheaper by the claimed share; in part a network for
    nothing would."""
    least = claim.bounds()[0] / 100
    own = results(CHAPTER, "provider/saving-at-their-prices")
    free = results.entry(CHAPTER, "provider/network-share")
    checks = (
        compare("share saved at its own prices", own, least),
        in_part(compare("share of the whole network", free["high"], least)),
    )
    text = (
        f"Its own prices, $15K and $7K a GPU, differ by {own:.0%} of a cluster. The whole network is {free['low']:.0%} "
        "to "
        f"{free['high']:.0%} of one, so that even a network for nothing saves no more."
    )
    change = "A cluster whose network is more than a third of its price."
    return found(claim, checks, text, change, "medium")


def _saving(results: Results) -> tuple[float, float]:
    """(saving with ZeRO-1, saving where the whole all-reduce is coded) of the 70B case on rented ports."""
    return results(CHAPTER, f"startup/saving/{PRICED}"), results(CHAPTER, f"startup/saving-whole/{PRICED}")


def cheaper_run(claim: Claim, results: Results) -> Finding:
    """From 1.2 million to 0.6 or 0.8 is a cut of a third to a half: its low end is reached on the network of rented
    H100, by the better of two ways to exchange."""
    sharded, whole = _saving(results)
    slow = results(CHAPTER, "startup/saving/100g")
    least = 1 - claim.bounds()[1] / 1.2e6
    checks = (compare("share saved on 400 Gbit/s", max(sharded, whole), least),)
    text = (
        f"A third to a half is claimed; on the ports that rented H100 have codes save {sharded:.0%} of a 70B step. On "
        "100 "
        f"Gbit/s they save {slow:.0%} of a longer step. The codec's speed on a GPU is assumed."
    )
    change = "A 70B step on rented H100 that halves with codes, timed."
    return found(claim, checks, text, change, "medium", "share of the cost = share of the time")


def more_runs(claim: Claim, results: Results) -> Finding:
    """Runs for the money of one, 1 / (1 - saving), on the network of rented H100, by the better of two ways to
    exchange."""
    runs = 1 / (1 - max(_saving(results)))
    text = (
        f"On the ports that rented H100 have the money of one 70B run buys {runs:.2f}; two need a saving of a half. "
        "The "
        "codec's speed on a GPU is assumed."
    )
    checks = (compare("runs for the money of one", runs, claim.bounds()[0]),)
    return found(claim, checks, text, "A budget that buys a second run by codes alone.", "medium", "1 / (1 - saving)")


def own_gpus(claim: Claim, results: Results) -> Finding:
    """Below the first threshold the interface of a provider is cheaper than one rented H100, at each price that was
    looked up."""
    billions = {name: results(CHAPTER, f"startup/api/{name}") for name in ("input", "output", "70b")}
    checks = [compare(f"billion tokens a month at the {name} price", each, 0.1) for name, each in billions.items()]
    text = (
        f"One rented H100 is cheaper from {min(billions.values()):.2f} to {max(billions.values()):.1f} billion tokens "
        "a "
        "month on, by the price that is paid for them; below a hundred million it is not. Whether it can serve as many "
        "depends on the load."
    )
    change = "Prices of providers ten times as high."
    return found(claim, checks, text, change, "low", "GPUs * price of a GPU-hour * 730 / price of a million tokens")


def _mixtral() -> dict[str, Figure]:
    shape = Transformer.preset("mixtral-8x7b")
    return {"by the published shape": (shape.active_parameters / 1e9, shape.parameters / 1e9)}


RULES: dict[str, Rule] = {
    "S0-052": cheaper_cluster,
    "S0-053": cheaper_run,
    "S0-054": more_runs,
    "S3-066": own_gpus,
    "S3-067": Formula(
        "parameters of 32 layers of width 4,096 with 8 experts of 14,336, and of the 2 that a token visits", _mixtral,
        "The published shape has 46.7 billion parameters, of which a token visits {0:.1f}. What that saves in serving "
        "is not measured.",
        "Another shape of Mixtral 8x7B.", "billion", claimed=Claim.ends, within=0.05, basis=PRINTED,
    ),
}  # fmt: skip

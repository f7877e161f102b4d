"""Rules over what providers, startups and laboratories would save."""

from __future__ import annotations

from tq.book.claims import ledger
from tq.book.claims.formulas import Figure, Formula
from tq.book.claims.ledger import PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems import Transformer

CHAPTER = "industry-impact"
PRICED = "400g"  # ports of the H100 that can be rented
CAPABLE = 1.2  # times the step on the fast network that count as capable
FEW = 0.1  # billion tokens per month below which the document wants an API


def cheaper_cluster(claim: Claim, results: Results) -> Finding:
    """Reproduced if Ethernet at the whitepaper's own prices makes a cluster cheaper by the claimed low end. A part
    holds if a network that costs nothing would, at these prices or by any other count that was found."""
    least = claim.bounds()[0] / 100
    own = results(CHAPTER, "provider/saving-at-their-prices")
    dear, cheap = (ledger.claim(each).number() for each in ("S0-004", "S0-005"))
    whole = own * dear / (dear - cheap)
    free = results.entry(CHAPTER, "provider/network-share")
    checks = (
        compare("share of a cluster saved at its own prices", own, least),
        in_part(compare("share of the whole network in a cluster, highest", max(whole, free["high"]), least)),
    )
    text = (
        f"By the whitepaper's own prices, ${dear:.0f}K and ${cheap:.0f}K per GPU, Ethernet makes a cluster {own:.0%} "
        f"cheaper (computed). A network that costs nothing would save {whole:.0%} at these prices, and "
        f"{free['low']:.0%} to {free['high']:.0%} by other counts."
    )
    change = "A cluster whose network is more than a third of its price."
    return found(claim, checks, text, change, "medium")


def _saving(results: Results) -> tuple[float, float]:
    """(saving with ZeRO-1, saving where the whole all-reduce is compressed) of the 70B case at 400 Gbit/s."""
    return results(CHAPTER, f"startup/saving/{PRICED}"), results(CHAPTER, f"startup/saving-whole/{PRICED}")


def cheaper_run(claim: Claim, results: Results) -> Finding:
    """From $1.2M to $600K or $800K is a cut of a half or a third. Reproduced if compression saves a third at 400 Gbit/s
    per GPU, the network of rented H100, by the better of two schemes: with ZeRO-1, or without it and with the whole
    all-reduce compressed."""
    sharded, whole = _saving(results)
    slow = results(CHAPTER, "startup/saving/100g")
    least = 1 - claim.bounds()[1] / 1.2e6
    checks = (compare("share saved at 400 Gbit/s", max(sharded, whole), least),)
    text = (
        f"At 400 Gbit/s per GPU compression saves {sharded:.1%} of a 70B step with ZeRO-1, {whole:.1%} without "
        f"(modelled). At 100 Gbit/s the saving is {slow:.0%} of a longer step; the codec's speed is that of one H200, "
        "scaled."
    )
    change = "A timed 70B step on rented H100 that takes a third less with compression."
    return found(claim, checks, text, change, "medium", "share of the cost = share of the time")


def more_runs(claim: Claim, results: Results) -> Finding:
    """Reproduced if the budget of one run buys the claimed number with compression, 1 / (1 - saving), at 400 Gbit/s per
    GPU, the network of rented H100. The better of two schemes counts: with ZeRO-1, or without it and with the whole
    all-reduce compressed."""
    runs = 1 / (1 - max(_saving(results)))
    text = (
        f"With compression at 400 Gbit/s per GPU the budget of one 70B run buys {runs:.2f} runs (modelled). Two runs "
        "need a saving of a half; the codec's speed is that of one H200, scaled."
    )
    checks = (compare("runs for the budget of one", runs, claim.bounds()[0]),)
    change = "A budget that buys a second run through compression alone."
    return found(claim, checks, text, change, "medium", "1 / (1 - saving)")


def own_gpus(claim: Claim, results: Results) -> Finding:
    """Reproduced if, at each API price that was looked up, a provider's API costs less than rented H100 below 100
    million tokens per month. A part holds if that is so at one price."""
    billions = {name: results(CHAPTER, f"startup/api/{name}") for name in ("input", "output", "70b")}
    names = {"input": "the input price", "output": "the output price", "70b": "the price of a 70B model"}
    checks = [
        compare(f"billion tokens per month at which both cost the same, at {names[name]}", each, FEW)
        for name, each in billions.items()
    ]
    text = (
        f"Rented H100 are computed to cost less than an API from {min(billions.values()):.2f} to "
        f"{max(billions.values()):.1f} billion tokens per month on, by the API's price. Below that an API "
        "is cheaper. Whether rented GPUs can serve so many was not tested."
    )
    change = "API prices ten times as high."
    return found(claim, checks, text, change, "low", "GPUs * price of a GPU-hour * 730 / price of a million tokens")


def ethernet_becomes_capable(claim: Claim, results: Results) -> Finding:
    """Reproduced if a plain 70B step on Ethernet of 100 Gbit/s per GPU takes half as long again as on 400, so that it
    was not capable, and a coded one at most a fifth longer. A part holds if the coded one does and the plain one does
    not."""
    plain, coded = (results(CHAPTER, f"provider/time/100g/{name}") for name in ("plain", "gradients"))
    slow = results(CHAPTER, "provider/time/25g/gradients")
    checks = (
        compare("plain step at 100 Gbit/s, times that at 400", plain, 1.5),
        in_part(
            Check(
                f"a plain step above 1.2 ({plain:.2f}) and a coded one at most 1.2 ({coded:.2f}) times that at 400",
                coded <= CAPABLE < plain,
            )
        ),
    )
    text = (
        f"Ethernet trains LLMs without compression: at 100 Gbit/s a plain 70B step takes {plain:.2f} times the time at "
        f"400, a coded one {coded:.2f} (modelled). At 25 Gbit/s a coded one takes {slow:.2f}."
    )
    return found(claim, checks, text, claim.would_change, "medium")


def _mixtral() -> dict[str, Figure]:
    shape = Transformer.preset("mixtral-8x7b")
    return {"by the published shape": (shape.active_parameters / 1e9, shape.parameters / 1e9)}


RULES: dict[str, Rule] = {
    "S0-052": cheaper_cluster,
    "S0-053": cheaper_run,
    "S0-054": more_runs,
    "S0-071": ethernet_becomes_capable,
    "S3-066": own_gpus,
    "S3-067": Formula(
        "parameters per token and in all of 32 layers of width 4,096 with 8 experts of 14,336, 2 per token", _mixtral,
        "By its published shape Mixtral 8x7B uses {0:.1f} of 46.7 billion parameters per token (computed). What that "
        "saves in inference was not measured.",
        "Another published shape of Mixtral 8x7B.", "billion", claimed=Claim.ends, within=0.05, basis=PRINTED,
    ),
}  # fmt: skip

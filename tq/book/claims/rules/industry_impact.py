"""Rules over what providers, startups and laboratories would save."""

from __future__ import annotations

from tq.book.claims.formulas import TIGHT, Figure, Formula
from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for
from tq.systems import Transformer

CHAPTER = "industry-impact"
TIERS = ("400g", "100g", "25g")  # the network tiers that the whitepaper names


def cheaper_cluster(claim: Claim, results: Results) -> Finding:
    """The low end of the range must be met by the whitepaper's own prices; in part if a network for nothing would."""
    low, _ = (value / 100 for value in claim.ends())
    own = results(CHAPTER, "provider/saving-at-their-prices")
    free = results.entry(CHAPTER, "provider/network-share")
    text = (
        f"the claimed $15K and $7K a GPU differ by {own:.0%} of a cluster with that InfiniBand; by a bill of "
        f"materials and two published shares the whole network is {free['low']:.0%} to {free['high']:.0%} of it, "
        "so that even a network for nothing saves no more"
    )
    change = "A cluster whose network is more than a third of its price, or a bill of materials for both fabrics."
    return Finding(verdict_for(own >= low, free["high"] >= low), text, change, "medium")


def _savings(results: Results) -> dict[str, tuple[float, float]]:
    """{tier: (saving with ZeRO-1, saving where the whole all-reduce is coded)} of the 70B case."""
    return {t: (results(CHAPTER, f"startup/saving/{t}"), results(CHAPTER, f"startup/saving-whole/{t}")) for t in TIERS}


def _shown(savings: dict[str, tuple[float, float]]) -> str:
    return ", ".join(f"{one:.0%} and {two:.0%} at {tier.upper()}" for tier, (one, two) in savings.items())


def cheaper_run(claim: Claim, results: Results) -> Finding:
    """$1.2M to 600K-800K cuts a third to a half: reproduced if all tiers give it, in part if one of them does."""
    savings = _savings(results)
    reached = [best >= 1 / 3 for _, best in savings.values()]
    text = (
        f"a third to a half; for 70B on 256 H100 the model saves {_shown(savings)} of the step, the first with ZeRO-1, "
        "the second with the whole exchange coded, each against the same link without the codec. A cut at 25G is "
        "one of a run that is longer than on the faster link; the codec's speed on a GPU is assumed"
    )
    return Finding(
        verdict_for(all(reached), any(reached)), text, "A measured step of that size on such a link.", "medium",
        "saving of the cost = saving of the time, at one price of a GPU-hour",
    )  # fmt: skip


def more_runs(claim: Claim, results: Results) -> Finding:
    """1 / (1 - saving) runs for the money of one; reproduced if all tiers give two, in part if one of them does."""
    low, _ = claim.ends()
    savings = _savings(results)
    runs = {tier: 1 / (1 - best) for tier, (_, best) in savings.items()}
    reached = [each >= low for each in runs.values()]
    text = "at best " + ", ".join(f"{each:.2f} at {tier.upper()}" for tier, each in runs.items())
    text += f" runs for the money of one; {low:g} need a saving of {1 - 1 / low:.0%}"
    return Finding(
        verdict_for(all(reached), any(reached)), text, "A measured step of that size on such a link.", "medium",
        "1 / (1 - saving)",
    )  # fmt: skip


def own_gpus(claim: Claim, results: Results) -> Finding:
    """The middle threshold, a billion tokens a month for dedicated GPUs, to a third: at every price of an API that was
    looked up, or at one of them. The other two thresholds are advice."""
    found = {name: results(CHAPTER, f"startup/api/{name}") for name in ("input", "output", "70b")}
    near = [2 / 3 <= billions <= 3 / 2 for billions in found.values()]
    text = (
        f"from {found['input']:.2f} billion tokens a month one rented H100 costs less than a large model's price of "
        f"input, from {found['output']:.2f} less than its price of output, and four cost less than a 70B model at "
        f"2.40 dollars from {found['70b']:.2f}; whether they can serve as many depends on the load"
    )
    return Finding(
        verdict_for(all(near), any(near)), text, "Other prices, or a model that needs another number of GPUs.", "low",
        "GPUs * price of a GPU-hour * 730 / price of a million tokens",
    )  # fmt: skip


def _mixtral() -> dict[str, Figure]:
    shape = Transformer.preset("mixtral-8x7b")
    return {"for the published shape": (shape.active_parameters / 1e9, shape.parameters / 1e9)}


RULES: dict[str, Rule] = {
    "S0-052": cheaper_cluster,
    "S0-053": cheaper_run,
    "S0-054": more_runs,
    "S3-066": own_gpus,
    "S3-067": Formula(
        "parameters of 32 layers of width 4,096 with 8 experts of 14,336, and of the 2 that a token visits", _mixtral,
        "billion", TIGHT, claimed=Claim.ends,
    ),
}  # fmt: skip

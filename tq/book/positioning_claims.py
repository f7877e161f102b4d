"""Rules over the chapters on position, industry and risk; see ``tq.book.claims``."""

from __future__ import annotations

from tq.book.ledger import (
    NOT_CHECKABLE,
    NOT_MEASURED,
    NOT_REPRODUCED,
    NOT_YET,
    PARTLY,
    REPRODUCED,
    Claim,
    Facts,
    Finding,
    Rule,
    graded,
)
from tq.book.source_claims import confidence_of, evidence_of, rows

INDUSTRY, ADAMW = "industry-impact", "compressed-adamw"
TIERS = ("400g", "100g", "25g")  # the network tiers that the whitepaper names
SAME = 0.01  # nats that two runs of one seed may differ by and still count as the same


def only_one(claim: Claim, facts: Facts) -> Finding:
    """A superlative falls with one counter-example: a method that compresses both, with AdamW in mixed precision."""
    found = [row for row in rows("sources.csv", "claim", claim.id) if row["outcome"] != "input"]
    if not found:
        return Finding(NOT_YET, "not looked up yet: data/sources.csv has no row that decides it", "Such a row.")
    against = [row for row in found if row["outcome"] == "differs"]
    near = [row for row in found if row["outcome"] == "partly"]
    read = [row for row in found if row["address"]]
    if not read:
        return Finding(NOT_CHECKABLE, "no other method was found, which proves nothing", "A source.")
    verdict = NOT_REPRODUCED if against else PARTLY if near else REPRODUCED
    said = "; ".join(row["found"].rstrip(".") for row in against or near or read)
    text = f"{said}. Left is the combination of four bits on both axes, of which no other was found"
    change = "A definition of both axes that leaves out what these methods compress."
    return Finding(verdict, text, change, confidence_of(read), evidence_of(read), "competitive-positioning")


def cheaper_cluster(claim: Claim, facts: Facts) -> Finding:
    """The low end of the range must be met by the whitepaper's own prices; in part if a network for nothing would."""
    low, _ = (value / 100 for value in claim.ends())
    own = facts(INDUSTRY, "provider/saving-at-their-prices")
    free = facts.entry(INDUSTRY, "provider/network-share")
    text = f"the claimed $15K and $7K a GPU differ by {own:.0%} of a cluster with that InfiniBand; by a bill of "
    text += f"materials and two published shares the whole network is {free['low']:.0%} to {free['high']:.0%} of it, "
    text += "so that even a network for nothing saves no more"
    change = "A cluster whose network is more than a third of its price, or a bill of materials for both fabrics."
    return Finding(graded(own >= low, free["high"] >= low), text, change, "medium")


def _savings(facts: Facts) -> dict[str, tuple[float, float]]:
    """{tier: (saving with ZeRO-1, saving where the whole all-reduce is coded)} of the 70B case."""
    return {t: (facts(INDUSTRY, f"startup/saving/{t}"), facts(INDUSTRY, f"startup/saving-whole/{t}")) for t in TIERS}


def _shown(savings: dict[str, tuple[float, float]]) -> str:
    return ", ".join(f"{one:.0%} and {two:.0%} at {tier.upper()}" for tier, (one, two) in savings.items())


def cheaper_run(claim: Claim, facts: Facts) -> Finding:
    """$1.2M to 600K-800K cuts a third to a half: reproduced if all tiers give it, in part if one of them does."""
    savings = _savings(facts)
    reached = [best >= 1 / 3 for _, best in savings.values()]
    text = (
        f"a third to a half; for 70B on 256 H100 the model saves {_shown(savings)} of the step, the first with ZeRO-1, "
    )
    text += "the second with the whole exchange coded, each against the same link without the codec. A cut at 25G is "
    text += "one of a run that is longer than on the faster link; the codec's speed on a GPU is assumed"
    return Finding(
        graded(all(reached), any(reached)), text, "A measured step of that size on such a link.", "medium",
        "saving of the cost = saving of the time, at one price of a GPU-hour",
    )  # fmt: skip


def more_runs(claim: Claim, facts: Facts) -> Finding:
    """1 / (1 - saving) runs for the money of one; reproduced if all tiers give two, in part if one of them does."""
    low, _ = claim.ends()
    savings = _savings(facts)
    runs = {tier: 1 / (1 - best) for tier, (_, best) in savings.items()}
    reached = [each >= low for each in runs.values()]
    text = "at best " + ", ".join(f"{each:.2f} at {tier.upper()}" for tier, each in runs.items())
    text += f" runs for the money of one; {low:g} need a saving of {1 - 1 / low:.0%}"
    return Finding(
        graded(all(reached), any(reached)), text, "A measured step of that size on such a link.", "medium",
        "1 / (1 - saving)",
    )  # fmt: skip


def own_gpus(claim: Claim, facts: Facts) -> Finding:
    """The middle threshold, a billion tokens a month for dedicated GPUs, to a third: at every price of an API that was
    looked up, or at one of them. The other two thresholds are advice."""
    found = {name: facts(INDUSTRY, f"startup/api/{name}") for name in ("input", "output", "70b")}
    near = [2 / 3 <= billions <= 3 / 2 for billions in found.values()]
    text = f"from {found['input']:.2f} billion tokens a month one rented H100 costs less than a large model's price of "
    text += f"input, from {found['output']:.2f} less than its price of output, and four cost less than a 70B model at "
    text += f"2.40 dollars from {found['70b']:.2f}; whether they can serve as many depends on the load"
    return Finding(
        graded(all(near), any(near)), text, "Other prices, or a model that needs another number of GPUs.", "low",
        "GPUs * price of a GPU-hour * 730 / price of a million tokens",
    )  # fmt: skip


def long_run(claim: Claim, facts: Facts) -> Finding:
    """Stable is a gap below a hundredth of a nat with its whole interval, over the steps that the claim names."""
    steps, wanted = facts(ADAMW, "steps"), claim.number() * (1000 if "K" in claim.value else 1)
    gap = facts.entry(ADAMW, "gap/gradient-4-4")
    text = f"the longest runs of this book with an interval have {steps:,.0f} steps, {steps / wanted:.1%} of the "
    text += f"{wanted:,.0f} that are named; over them four-bit gradients end {gap['value']:+.4f} nats from the baseline"
    if steps < wanted:
        return Finding(NOT_MEASURED, text, "Runs of that length, in pairs.")
    worst = gap.get("high", gap["value"])
    return Finding(graded(worst < SAME, gap["value"] < SAME), text, "Longer runs, or larger models.", "medium")


RULES: dict[str, Rule] = {
    "S0-011": only_one,
    "S0-052": cheaper_cluster,
    "S0-053": cheaper_run,
    "S0-054": more_runs,
    "S3-066": own_gpus,
    "S0-058": long_run,
}

"""Rules over what compression saves of a run's cost."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for

CHAPTER = "impact-training-cost"
BASES = ("bf16", "fp32")
TIMED = "A timed run on such a network with a codec of that speed."
Interval = tuple[float, float, float]


def _three(results: Results, key: str) -> Interval:
    low, mid, high = (results(CHAPTER, f"{key}/{end}") for end in ("low", "mid", "high"))
    return low, mid, high


def _percent(i: Interval) -> str:
    return f"{i[1]:.1%} ({i[0]:.1%} to {i[2]:.1%})"


def _saving(results: Results, low: float) -> tuple[bool, bool, str]:
    """(on the priced network, on any, text): whether the median saving with a fast codec reaches `low`."""
    found = {(g, b): _three(results, f"saving/predicted/{g}g/{b}/fast-codec") for g in (400, 100, 25) for b in BASES}
    holds = [where for where, i in found.items() if i[1] >= low]
    text = "reached on " + " and ".join(f"{g} Gbit/s a GPU against {b}" for g, b in holds) if holds else "not reached"
    text += "; a 70B run with a fast codec saves in the median "
    text += ", ".join(f"{_percent(i)} on {g} against {b}" for (g, b), i in found.items())
    needed = results(CHAPTER, "needed-share/claimed/low"), results(CHAPTER, "needed-share/claimed/high")
    text += f". 27 and 56 % need data-parallel shares of {needed[0]:.0%} and {needed[1]:.0%} at 8x without overhead"
    return (400, "bf16") in holds, bool(holds), text


def share_saved(claim: Claim, results: Results) -> Finding:
    """The median saving reaches the claimed range on the network of the priced GPUs, against bf16; in part on a
    slower one or against fp32."""
    low = claim.ends()[0] / 100
    priced, elsewhere, text = _saving(results, low)
    return Finding(verdict_for(priced, elsewhere), text, TIMED, "medium", "1 - (1 - f) k - f / r")


def _dollars(results: Results, run: str, low: float) -> tuple[bool, bool, str]:
    """(median reaches the sum on the priced network, 80 % interval on 100 Gbit/s against fp32 does, text)."""
    priced, hundred = _three(results, f"saved/{run}/400g/bf16"), _three(results, f"saved/{run}/100g/fp32")
    text = (
        f"a fast codec saves {priced[1] / 1e3:,.0f} thousand dollars on 400 Gbit/s a GPU against bf16 and "
        f"{hundred[1] / 1e3:,.0f} ({hundred[0] / 1e3:,.0f} to {hundred[2] / 1e3:,.0f}) on 100 against fp32"
    )
    return priced[1] >= low, hundred[2] >= low, text


def dollars_saved(claim: Claim, results: Results) -> Finding:
    """The median reaches the sum on the priced network; in part if the interval on 100 Gbit/s against fp32 does."""
    low, _ = claim.ends()
    priced, hundred, text = _dollars(results, "70b", low)
    claimed = (
        f"the sums are 27 and 56 % of ${results(CHAPTER, 'claimed/base'):,.0f}, a run too short for 70B; one of "
        f"twenty tokens a parameter costs {results(CHAPTER, 'cost/70b/mid'):.1f} million. There "
    )
    text = claimed + text
    return Finding(verdict_for(priced, hundred), text, TIMED, "low", "27 % and 56 % of 256 * 3 * 168 * 6.88")


def fifth_of_the_table(claim: Claim, results: Results) -> Finding:
    """Both ends as the claimed share of the table's costs, and reached as in `dollars_saved`; in part one of these."""
    low, _ = claim.ends()
    shares = results(CHAPTER, "claimed/share-of-table/low"), results(CHAPTER, "claimed/share-of-table/high")
    consistent = abs(shares[0] - 0.2) <= 0.02 and abs(shares[1] - 0.4) <= 0.02
    priced, hundred, text = _dollars(results, "70b", low)
    text = f"its ends are {shares[0]:.0%} and {shares[1]:.0%} of the ends of its table, not 20 and 40 %; {text}"
    return Finding(verdict_for(consistent and priced, consistent or hundred), text, TIMED, "low")


def both(claim: Claim, results: Results) -> Finding:
    """The dollars and the percentage; in part one of them, or both in part."""
    priced, elsewhere, text = _saving(results, 0.27)
    usd_priced, usd_hundred, dollars = _dollars(results, "70b", claim.ends()[0])
    verdict = verdict_for(priced and usd_priced, priced or elsewhere or usd_priced or usd_hundred)
    return Finding(verdict, f"{text}; {dollars}", TIMED, "low")


def large_model(claim: Claim, results: Results) -> Finding:
    """175B: the sum is reached on the priced network by the run of GPT-3's tokens; in part by a longer one on 100
    Gbit/s. The eight millions of infrastructure are another claim."""
    low = 1.2e6
    short, _, _ = _dollars(results, "175b-gpt-3", low)
    _, long, text = _dollars(results, "175b-20", low)
    cost = results(CHAPTER, "cost/175b-gpt-3/mid")
    text = (
        f"on GPT-3's tokens such a run costs {cost:.1f} million in all; on twenty a parameter {text}. The "
        "infrastructure is S0-016"
    )
    return Finding(verdict_for(short, long), text, TIMED, "low")


def strategy(claim: Claim, results: Results) -> Finding:
    """A factor of three between two layouts of one run on the network that its GPUs come with; in part on a slower."""
    fast, slow = results(CHAPTER, "layout-factor/ib-ndr"), results(CHAPTER, "layout-factor/eth-100g")
    text = (
        f"tensor parallelism across nodes makes a 70B step {fast:.2f} times as long on 400 Gbit/s a GPU and {slow:.2f} "
        "times on 100; nobody would train so for long"
    )
    return Finding(verdict_for(fast >= 3, slow >= 3), text, "Two published runs that differ so.", "medium")


def elastic(claim: Claim, results: Results) -> Finding:
    """Discounts of spot offers within the range, to two points; in part if the ranges meet."""
    low, high = (end / 100 for end in claim.ends())
    found = results(CHAPTER, "spot-discount/low"), results(CHAPTER, "spot-discount/high")
    inside = low - 0.02 <= found[0] and found[1] <= high + 0.02
    text = (
        f"spot is {found[0]:.0%} to {found[1]:.0%} below on-demand over {results(CHAPTER, 'spot-discount/offers'):.0f} "
        "pairs of offers of the snapshot; what interruptions cost is not in it"
    )
    meets = found[0] <= high and low <= found[1]
    return Finding(verdict_for(inside, meets), text, "A run on such offers, with its interruptions.", "low")


RULES: dict[str, Rule] = {
    "S0-007": share_saved,
    "S0-008": dollars_saved,
    "S0-018": fifth_of_the_table,
    "S0-019": share_saved,
    "S0-043": both,
    "S0-044": large_model,
    "S3-009": strategy,
    "S3-030": elastic,
}

"""Rules over what compression saves of a run's cost."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part

CHAPTER, NETWORKS = "impact-training-cost", "impact-communication"
SURE, UNLIKELY = 0.8, 0.2  # probability from which on a sum is reached, and down to which it is not
EXPECTED = "codec-as-expected"
MODEL = "saving of the reference job, tq.economics.savings"


def _saves(share: float) -> str:
    return f"saves {share:.1%}" if share > 0 else f"costs {-share:.1%}"


def share_saved(claim: Claim, results: Results) -> Finding:
    """The reference job costs less by the claimed share on the network of rented H100, the codec as fast as expected,
    with a probability of .8; in part with .2 or more, against bf16 or fp32."""
    chance = {base: results(CHAPTER, f"saving/predicted/400g/{base}/{EXPECTED}/reaches") for base in ("bf16", "fp32")}
    low, mid, high = (results(CHAPTER, f"job/400g/{key}") for key in ("saving-low", "saving", "saving-high"))
    slower = results(NETWORKS, "relative/70b/coded-100g") - 1
    checks = (
        compare("probability that 27 % are saved against bf16", chance["bf16"], SURE),
        in_part(compare("the same", chance["bf16"], UNLIKELY)),
        in_part(compare("against fp32", chance["fp32"], UNLIKELY)),
    )
    text = (
        f"On the 400 Gbit/s of rented H100 codes {_saves(mid)} of a 70B run (80 %: {low:+.1%} to {high:+.1%}); 27 % "
        f"are saved with a probability of {chance['bf16']:.0%}. Coded on 100 Gbit/s the run takes {slower:.0%} longer. "
        "By a model."
    )
    return found(claim, checks, text, "A timed 70B step with and without codes on 400 Gbit/s.", "medium", MODEL)


def fifth_saved(claim: Claim, results: Results) -> Finding:
    """The median saving of the reference job reaches the low end, the codec as fast as expected; in part the upper end
    of its 80 % interval does."""
    key = f"saving/predicted/400g/bf16/{EXPECTED}"
    low, mid, high = (results(CHAPTER, f"{key}/{end}") for end in ("low", "mid", "high"))
    least = claim.bounds()[0] / 100
    checks = (compare("median saving", mid, least), in_part(compare("that of one in ten", high, least)))
    text = (
        f"On the 400 Gbit/s of rented H100 codes {_saves(mid)} of a 70B run in the median (80 %: {low:+.1%} to "
        f"{high:+.1%}). Its table's own ends differ by 20 % at both. By a model."
    )
    return found(claim, checks, text, "A fifth of a 70B run that waits for its gradients.", "medium", MODEL)


def _dollars(run: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """The codec, as fast as expected, saves the claimed sum on the network of rented H100 against bf16 with a
        probability of .8; in part with .2 or more, there or on 100 Gbit/s against fp32."""
        priced = results(CHAPTER, f"saved/{run}/400g/bf16/reached")
        mid = results(CHAPTER, f"saved/{run}/400g/bf16/mid")
        slow, slow_mid = (results(CHAPTER, f"saved/{run}/100g/fp32/{what}") for what in ("reached", "mid"))
        cost = results(CHAPTER, f"cost/{run}/mid")
        checks = (
            compare("probability of the sum on 400 Gbit/s against bf16", priced, SURE),
            in_part(compare("the same", priced, UNLIKELY)),
            in_part(compare("on 100 Gbit/s against fp32", slow, UNLIKELY)),
        )
        saves = f"saves ${mid / 1e3:,.0f}K" if mid > 0 else f"costs ${-mid / 1e3:,.0f}K"
        slow_saves = f"saves ${slow_mid / 1e3:,.0f}K" if slow_mid > 0 else f"costs ${-slow_mid / 1e3:,.0f}K"
        text = (
            f"On 400 Gbit/s the codec {saves} of a run of {cost:.1f} million dollars in the median, on 100 Gbit/s "
            f"against fp32 it {slow_saves}: the sum is reached with a probability of {priced:.0%} and {slow:.0%}."
        )
        return found(claim, checks, text, change, "medium", "share saved * cost of the run")

    return rule


def strategy(claim: Claim, results: Results) -> Finding:
    """A factor of three or more between two layouts of one run on the network that its GPUs come with; in part on a
    slower."""
    fast, slow = results(CHAPTER, "layout-factor/ib-ndr"), results(CHAPTER, "layout-factor/eth-100g")
    least = claim.bounds()[0]
    checks = (
        compare("times as long by the worse layout, on 400 Gbit/s", fast, least),
        in_part(compare("on 100 Gbit/s", slow, least)),
    )
    text = (
        f"Tensor parallelism across nodes makes a 70B step {fast:.2f} times as long on 400 Gbit/s a GPU and {slow:.2f} "
        "times on 100. Nobody would train so for long, and whose strategy it was is not known."
    )
    return found(claim, checks, text, "Two published runs of one model that differ so.", "medium")


RULES: dict[str, Rule] = {
    "S0-007": share_saved,
    "S0-008": _dollars("70b", "A 70B run that waits for a third of its time on the network of rented GPUs."),
    "S0-018": _dollars("70b", "A 70B run that saves both its share and its dollars."),
    "S0-019": fifth_saved,
    "S0-044": _dollars("175b-gpt-3", "A 175B run on GPT-3's tokens that costs several times 1.2 million dollars."),
    "S3-009": strategy,
}

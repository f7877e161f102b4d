"""Rules over the share of communication, slower networks with codes, and what fabrics cost."""

from __future__ import annotations

from tq.book.claims import ledger
from tq.book.claims.formulas import STORED, Figure, Formula, Readings, ratios
from tq.book.claims.ledger import NOT_CHECKABLE, PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.quant.bounds import compression_ratio

CHAPTER = "impact-communication"
DATA_PARALLEL = ("7b", "70b", "175b", "405b")  # runs that send only gradients and pipeline traffic between nodes
RUNS = (*DATA_PARALLEL, "70b-tp16", "8x22b-ep8")
FABRIC = {
    "switches-and-cables": "switches and cables", "17-percent": "17 % of a cluster", "20-percent": "20 % of a cluster",
}  # fmt: skip
EQUAL = 0.02  # share of a step's time that still counts as none


def _claimed_usd() -> tuple[float, float]:
    """InfiniBand and Ethernet as the whitepaper has them, dollars a GPU."""
    infiniband, ethernet = (ledger.claim(name).number() for name in ("S0-004", "S0-005"))
    return infiniband * 1e3, ethernet * 1e3  # from millions a thousand GPUs


def _all(results: Results, pattern: str, names: tuple[str, ...]) -> dict[str, float]:
    return {name: results(CHAPTER, pattern.format(name)) for name in names}


def _spread(values: dict[str, float]) -> str:
    return f"{min(values.values()):.1%} to {max(values.values()):.0%}"


def share_of_time(claim: Claim, results: Results) -> Finding:
    """The exchange of gradients, which codes can shorten, takes the claimed share of every run's step on the network to
    be replaced; in part where all communication does, or the exchange does on 25 Gbit/s."""
    low, high = (end / 100 for end in claim.bounds())
    fast = _all(results, "waits/{}/ib-ndr/data-parallel", RUNS)
    slow = _all(results, "waits/{}/eth-25g/data-parallel", DATA_PARALLEL)
    every = _all(results, "waits/{}/ib-ndr/all", RUNS)
    checks = [compare(f"share of {name}, gradients on 400 Gbit/s", value, low, high) for name, value in fast.items()]
    checks += [in_part(compare(f"{name}, all on 400", value, low, high)) for name, value in every.items()]
    checks += [in_part(compare(f"{name}, gradients on 25", value, low, high)) for name, value in slow.items()]
    text = (
        f"Gradients take {_spread(fast)} of a step on 400 Gbit/s, the network to be replaced, and {_spread(slow)} on "
        "25. "
        f"All communication takes up to {max(every.values()):.0%} on 400, of activations, which codes of gradients "
        "leave "
        "as they are."
    )
    return found(claim, checks, text, "A profile of a run on InfiniBand that waits so for its gradients.", "medium")


def equal_throughput(claim: Claim, results: Results) -> Finding:
    """No run takes more than two per cent longer on Ethernet at 100 Gbit/s with codes than on InfiniBand at 400
    without;
    in part if one does not."""
    ratio = _all(results, "relative/{}/coded-100g", RUNS)
    checks = [compare(f"time of {name} over that on InfiniBand", each, most=1 + EQUAL) for name, each in ratio.items()]
    text = (
        f"A step on Ethernet at 100 Gbit/s with codes takes {ratio['7b']:.3f} times as long as on InfiniBand at 400 "
        f"without for 7B, {ratio['70b']:.2f} for 70B and {max(ratio.values()):.1f} where tensor parallelism crosses "
        "nodes. The base sends fp32."
    )
    return found(claim, checks, text, "The same runs, timed on both networks.", "medium")


def double_throughput(claim: Claim, results: Results) -> Finding:
    """A step takes half as long as on InfiniBand; in part where the payload's rate is doubled, against fp32 or bf16."""
    payload = {base: results(CHAPTER, f"effective/100/no-time/{base}") / 400 for base in ("fp32", "bf16")}
    least = results(CHAPTER, "relative/least")
    low, high = claim.bounds()
    checks = [compare("speed of the fastest step over that on InfiniBand", 1 / least, low, high)]
    checks += [in_part(compare(f"rate of a payload against {b}", each, low, high)) for b, each in payload.items()]
    text = (
        f"Coded Ethernet at 100 Gbit/s carries {payload['fp32']:.2f} times the payload of InfiniBand's 400 if fp32 "
        "would "
        f"have been sent, {payload['bf16']:.2f} if bf16; a step takes at least {least:.3f} times as long."
    )
    return found(claim, checks, text, "A step that half the time of InfiniBand is enough for, timed.", "high")


def infiniband_cost(claim: Claim, results: Results) -> Finding:
    """Every cost that was found comes to the claimed one, a GPU."""
    usd = {words: results(CHAPTER, f"fabric/{key}") for key, words in FABRIC.items()}
    low, high = (1e3 * end for end in claim.bounds())
    checks = [compare(f"dollars a GPU by {words}", each, low, high) for words, each in usd.items()]
    text = (
        f"Found were ${min(usd.values()):,.0f} a GPU by a bill of switches and cables, and up to "
        f"${max(usd.values()):,.0f} as a share of interconnect in a cluster's cost. Claimed are "
        f"${_claimed_usd()[0]:,.0f}."
    )
    change = "A bill of materials of InfiniBand with 15,000 dollars a GPU."
    return found(claim, checks, text, change, "low", basis=PRINTED)


def ethernet_cost(claim: Claim, results: Results) -> Finding:
    """Nobody prices an Ethernet beside an InfiniBand of its size; what is found for InfiniBand is a bound of a kind."""
    bill, (_, claimed) = results(CHAPTER, "fabric/switches-and-cables"), _claimed_usd()
    text = (
        "No bill of materials for Ethernet beside InfiniBand was found. The InfiniBand of 1,024 H100 that was found "
        "costs "
        f"${bill:,.0f} a GPU, {'less' if bill < claimed else 'more'} than the Ethernet that is claimed at "
        f"${claimed:,.0f}."
    )
    return Finding(NOT_CHECKABLE, text, "A bill of materials for Ethernet of a thousand GPUs.")


def infrastructure_saving(claim: Claim, results: Results) -> Finding:
    """The one bill of materials that was found for InfiniBand comes to more than the claimed saving, as Ethernet is not
    free."""
    bill, share = results(CHAPTER, "fabric/switches-and-cables"), results(CHAPTER, "fabric/20-percent")
    checks = (compare("dollars of InfiniBand a GPU", bill, 1e3 * claim.bounds()[0]),)
    text = (
        f"The InfiniBand whose bill was found costs ${bill:,.0f} a GPU in all, and ${share:,.0f} by the largest share: "
        f"$8,000 cannot be saved on it. A 70B step takes {results(CHAPTER, 'relative/70b/coded-100g'):.2f} times as "
        "long on "
        "the slower network."
    )
    return found(claim, checks, text, "Bills of materials for both networks at one size.", "low", "15 - 7")


def mandatory(claim: Claim, results: Results) -> Finding:
    """No large model was trained without InfiniBand."""
    used = results(CHAPTER, "roce/used")
    text = (
        f"Llama 3 405B was trained on up to {used:,.0f} GPUs on Ethernet at 400 Gbit/s, without codes. The factor of "
        "two "
        "is the document's $15M over its $7M, which have no source."
    )
    checks = (Check(f"{used:,.0f} GPUs trained without InfiniBand, needed none", used == 0),)
    return found(claim, checks, text, "A scale at which nobody trains on Ethernet.", "medium", basis=PRINTED)


def meta_on_ethernet(claim: Claim, results: Results) -> Finding:
    """As many GPUs as claimed trained the model on RoCE; in part where the cluster has them."""
    size, used = results(CHAPTER, "roce/gpus"), results(CHAPTER, "roce/used")
    low, high = claim.bounds()
    checks = (compare("GPUs that trained", used, low, high), in_part(compare("GPUs of the cluster", size, low, high)))
    text = (
        f"The RoCE cluster has {size:,.0f} GPUs, of which up to {used:,.0f} trained the 405B model: at 400 Gbit/s a "
        "GPU and "
        "without codes, so it does not show that slower Ethernet suffices."
    )
    return found(claim, checks, text, "Meta's own paper with 24,000 GPUs in one run.", "medium", basis=PRINTED)


def synchronisation(claim: Claim, results: Results) -> Finding:
    """All communication that a step waits for lies in the range for every run on 400 Gbit/s; in part for some."""
    low, high = (end / 100 for end in claim.bounds())
    fast, slow = _all(results, "waits/{}/ib-ndr/all", RUNS), _all(results, "waits/{}/eth-100g/all", RUNS)
    checks = [compare(f"share of {name} on 400 Gbit/s", value, low, high) for name, value in fast.items()]
    text = (
        f"Predicted are {_spread(fast)} of a step over six runs on 400 Gbit/s, {_spread(slow)} on 100. Published for "
        f"traffic within layers are {results(CHAPTER, 'published-share/low'):.0%} to "
        f"{results(CHAPTER, 'published-share/high'):.0%}."
    )
    return found(claim, checks, text, "A source for three quarters of the time.", "medium")


def sync_at_batch(claim: Claim, results: Results) -> Finding:
    """Below the limit at 32 and 128 examples, whether each replica sees them or all together do: it is not said."""
    most = claim.bounds()[1] / 100
    shares = {label: [results(CHAPTER, f"batch/{label}/{n}") for n in (32, 128)] for label in ("a-replica", "in-all")}
    words = {"a-replica": "a replica", "in-all": "in all"}
    checks = [compare(f"largest share, examples {words[k]}", max(pair), most=most) for k, pair in shares.items()]
    each, every = shares["a-replica"], shares["in-all"]
    text = (
        f"70B on 256 GPUs at 400 Gbit/s waits {each[0]:.1%} and {each[1]:.1%} of the time if each replica sees 32 and "
        "128 "
        f"examples of 4,096 tokens, {every[0]:.0%} and {every[1]:.0%} if all together do."
    )
    return found(claim, checks, text, "A statement of what a batch is.", "medium", "t / (t + c)")


LINK = "rate * base bits / (4 + scale bits / 128)"


def _effective(rate: float) -> Readings:
    """A link of `rate` Gbit/s, as fast as an uncoded one would have to be."""
    return lambda: {label: rate * float(ratio) for label, ratio in ratios("fp32", "bf16").items()}  # type: ignore[arg-type]


def _link(rate: int, change: str) -> Formula:
    return Formula(
        LINK, _effective(rate),
        f"{rate} Gbit/s carry what {{0:,.0f}} would if fp32 is replaced, with bf16 scales, and {{2:,.0f}} if bf16 is, "
        "which "
        "mixed precision sends. Payload alone; the codec's time is not in it.",
        change, "Gbit/s",
    )  # fmt: skip


def _over_infiniband() -> dict[str, Figure]:
    return {
        "Ethernet codes fp32": 100 * compression_ratio(STORED) / 400,
        "Ethernet codes bf16": 100 * compression_ratio(STORED, 16) / 400,
        "both code, as its own first row has it": 100 / 400,
    }


RULES: dict[str, Rule] = {
    "S0-004": infiniband_cost,
    "S0-005": ethernet_cost,
    "S0-006": equal_throughput,
    "S0-013": share_of_time,
    "S0-015": mandatory,
    "S0-016": infrastructure_saving,
    "S0-034": _link(400, "The format that InfiniBand's effective rate replaces."),
    "S0-035": _link(100, "The format that the effective rate of 100 Gbit/s replaces."),
    "S0-036": Formula(
        "effective rate of 100G over that of 400G", _over_infiniband,
        "{0:.2f} times if only the Ethernet codes and fp32 is replaced, {1:.2f} if bf16 is; with codes on both, as the "
        "table's first row has it, {2:.2f}.",
        "A reason why InfiniBand would not code.", "x",
    ),
    "S0-037": _link(25, "The format that the effective rate of 25 Gbit/s replaces."),
    "S0-039": double_throughput,
    "S0-040": meta_on_ethernet,
    "S3-003": synchronisation,
    "S3-034": sync_at_batch,
}  # fmt: skip

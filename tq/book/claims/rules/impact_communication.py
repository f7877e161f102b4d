"""Rules over the share of communication, slower networks with codes, and what fabrics cost."""

from __future__ import annotations

from tq.book.claims import ledger
from tq.book.claims.formulas import PAYLOAD, STORED, WIRE, Formula, Readings
from tq.book.claims.ledger import NOT_CHECKABLE, Claim, Finding, Results, Rule, verdict_for
from tq.quant.bounds import compression_ratio

CHAPTER = "impact-communication"
DATA_PARALLEL = ("7b", "70b", "175b", "405b")  # runs that send only gradients and pipeline traffic between nodes
RUNS = (*DATA_PARALLEL, "70b-tp16", "8x22b-ep8")
FABRIC = ("switches-and-cables", "17-percent", "20-percent")
BILL = "A bill of materials for both networks at the same size."


def _claimed_usd() -> tuple[float, float]:
    """InfiniBand and Ethernet as the whitepaper has them, dollars a GPU."""
    infiniband, ethernet = (ledger.claim(name).number() for name in ("S0-004", "S0-005"))
    return infiniband * 1e3, ethernet * 1e3  # from millions a thousand GPUs


def _all(results: Results, pattern: str, names: tuple[str, ...]) -> dict[str, float]:
    return {name: results(CHAPTER, pattern.format(name)) for name in names}


def share_of_time(claim: Claim, results: Results) -> Finding:
    """The share that codes can shorten: inside the range on the network to be replaced for every run; in part where it
    is on slower ones, or where only all communication together is."""
    low, high = (end / 100 for end in claim.ends())
    fast = _all(results, "waits/{}/ib-ndr/data-parallel", RUNS)
    slow = _all(results, "waits/{}/eth-25g/data-parallel", DATA_PARALLEL)
    every = _all(results, "waits/{}/ib-ndr/all", RUNS)
    text = (
        f"data-parallel exchange is {min(fast.values()):.1%} to {max(fast.values()):.1%} of a step on 400 Gbit/s a "
        f"GPU and {min(slow.values()):.0%} to {max(slow.values()):.0%} on 25; all communication on 400 is up to "
        f"{max(every.values()):.0%}, of activations. Published shares of {results(CHAPTER, 'published-share/low'):.0%}"
        f" to {results(CHAPTER, 'published-share/high'):.0%} are such traffic within layers"
    )
    part = any(low <= value <= high for value in (*slow.values(), *every.values()))
    verdict = verdict_for(all(low <= value <= high for value in fast.values()), part)
    return Finding(verdict, text, "A profile of such a run.", "medium")


def equal_throughput(claim: Claim, results: Results) -> Finding:
    """No run takes more than two per cent longer on Ethernet at 100 Gbit/s with codes than on InfiniBand at 400
    without; in part if one does not."""
    ratio = _all(results, "relative/{}/coded-100g", RUNS)
    like = results(CHAPTER, "relative/70b/like-for-like")
    text = "a step on Ethernet at 100 Gbit/s with codes takes " + ", ".join(f"{r:.3f}x ({n})" for n, r in ratio.items())
    text += f" of one on InfiniBand at 400 without; with codes on both {like:.2f}x for 70B. The base sends fp32"
    good = [r <= 1.02 for r in ratio.values()]
    return Finding(verdict_for(all(good), any(good)), text, "The same runs, timed on both networks.", "medium")


def double_throughput(claim: Claim, results: Results) -> Finding:
    """Payload: at least 1.8 of the claimed 2 against bf16 and fp32; runs: none slower. In part if only some payload."""
    payload = {base: results(CHAPTER, f"effective/100/no-time/{base}") / 400 for base in ("fp32", "bf16")}
    least = results(CHAPTER, "relative/least")
    near = [value >= 0.9 * claim.number() for value in payload.values()]
    text = (
        f"the payload rate of coded Ethernet at 100 Gbit/s is {payload['fp32']:.2f} of InfiniBand's 400 if fp32 would "
        f"have been sent and {payload['bf16']:.2f} if bf16, with a codec that takes no time; a step takes at least "
        f"{least:.3f}x as long"
    )
    return Finding(verdict_for(all(near) and least < 1, any(near)), text, "The same runs, timed on both.", "high")


def infiniband_cost(claim: Claim, results: Results) -> Finding:
    """Every cost that was found within a quarter of the claimed one; in part if one is."""
    found = _all(results, "fabric/{}", FABRIC)
    claimed, _ = _claimed_usd()
    near = [abs(usd / claimed - 1) <= 0.25 for usd in found.values()]
    text = (
        f"found were ${found[FABRIC[0]]:,.0f} a GPU for switches and cables, and ${found[FABRIC[1]]:,.0f} and "
        f"${found[FABRIC[2]]:,.0f} as shares of interconnect in a cluster of ${results(CHAPTER, 'fabric/cluster'):,.0f}"
        f" a GPU; claimed are ${claimed:,.0f}"
    )
    return Finding(verdict_for(all(near), any(near)), text, BILL, "low")


def ethernet_cost(claim: Claim, results: Results) -> Finding:
    """Nobody prices an Ethernet beside an InfiniBand of its size; what is found for InfiniBand is a bound of a kind."""
    found, (_, claimed) = results(CHAPTER, "fabric/switches-and-cables"), _claimed_usd()
    text = (
        "no bill of materials for Ethernet beside one for InfiniBand was found; the InfiniBand fabric of 1,024 H100 "
        f"that was found costs ${found:,.0f} a GPU, {'less' if found < claimed else 'more'} than the ${claimed:,.0f}"
    )
    return Finding(NOT_CHECKABLE, text, BILL)


def infrastructure_saving(claim: Claim, results: Results) -> Finding:
    """15 - 7 = 8 is arithmetic; to be saved, InfiniBand must cost more than that by every account, in part by one."""
    found = _all(results, "fabric/{}", FABRIC)
    saved = claim.number() * 1e3
    dearer = [usd > saved for usd in found.values()]
    infiniband, ethernet = _claimed_usd()
    same = abs(infiniband - ethernet - saved) < 1
    text = (
        f"the difference of two figures without a source, {results(CHAPTER, 'fabric/saved-share'):.0%} of a cluster; "
        f"the InfiniBand fabrics that were found cost ${min(found.values()):,.0f} to ${max(found.values()):,.0f} a GPU "
        f"in all. A 70B step takes {results(CHAPTER, 'relative/70b/coded-100g'):.3f}x on the slower network with codes"
        f", so it must be cheaper by ${results(CHAPTER, 'must-save/70b/coded-100g'):,.0f} a GPU to pay, without codes "
        f"by ${results(CHAPTER, 'must-save/70b/plain-100g'):,.0f}"
    )
    return Finding(verdict_for(same and all(dearer), same and any(dearer)), text, BILL, "low", "15 - 7")


def mandatory(claim: Claim, results: Results) -> Finding:
    """Two statements: mandatory (no published run of that size on Ethernet), and twice the cost by its own figures."""
    without = results(CHAPTER, "roce/used") < 1000
    infiniband, ethernet = _claimed_usd()
    twice = abs(infiniband / ethernet / claim.number() - 1) <= 0.1
    text = (
        f"Llama 3 405B was trained on up to {results(CHAPTER, 'roce/used'):,.0f} GPUs on Ethernet at 400 Gbit/s, "
        f"without codes; the factor is 15 / 7 = {infiniband / ethernet:.2f}, of two figures without a source"
    )
    return Finding(verdict_for(without and twice, without or twice), text, BILL, "medium", "15 / 7")


def meta_on_ethernet(claim: Claim, results: Results) -> Finding:
    """The cluster's size agrees, and all of it served; in part if less did."""
    size, used = results(CHAPTER, "roce/gpus"), results(CHAPTER, "roce/used")
    near = abs(size / claim.number() - 1) <= 0.05
    text = (
        f"the RoCE cluster has {size:,.0f} GPUs, of which up to {used:,.0f} trained the 405B model, at 400 Gbit/s "
        "a GPU and without compressed gradients; so it does not show that slower Ethernet suffices"
    )
    return Finding(
        verdict_for(near and used >= 0.95 * size, near), text, "The paper itself; a copy was read.", "medium"
    )


def synchronisation(claim: Claim, results: Results) -> Finding:
    """All communication that is waited for: every run inside the range on the network that its GPUs come with; in part
    some, there or on slower links."""
    low, high = (end / 100 for end in claim.ends())
    fast = _all(results, "waits/{}/ib-ndr/all", RUNS)
    slow = _all(results, "waits/{}/eth-100g/all", RUNS)
    inside = [low <= value <= high for value in fast.values()]
    text = (
        f"predicted waiting for communication is {min(fast.values()):.1%} to {max(fast.values()):.0%} of a step "
        f"over six runs on 400 Gbit/s and {min(slow.values()):.1%} to {max(slow.values()):.0%} on 100; "
        f"published for traffic within layers are {results(CHAPTER, 'published-share/low'):.0%} to "
        f"{results(CHAPTER, 'published-share/high'):.0%}"
    )
    part = any(inside) or any(low <= value <= high for value in slow.values())
    return Finding(verdict_for(all(inside), part), text, "A source for the upper end.", "medium")


def sync_at_batch(claim: Claim, results: Results) -> Finding:
    """Below 10 % at 32 and 128 examples, counted over all replicas and for each; in part if by one of the counts."""
    limit = claim.ends()[0] / 100
    found = {label: [results(CHAPTER, f"batch/{label}/{n}") for n in (32, 128)] for label in ("in-all", "a-replica")}
    good = [max(pair) < limit for pair in found.values()]
    text = (
        f"70B on 256 GPUs at 400 Gbit/s: {found['a-replica'][0]:.1%} and {found['a-replica'][1]:.1%} if each replica "
        f"sees 32 and 128 examples of 4,096 tokens, {found['in-all'][0]:.0%} and {found['in-all'][1]:.0%} if all do"
    )
    return Finding(verdict_for(all(good), any(good)), text, "A statement of what a batch is.", "medium", "t / (t + c)")


LINK = "rate * base bits / (4 + 32/128)"


def _effective(rate: float) -> Readings:
    """A link of `rate` Gbit/s, as fast as an uncoded one would have to be."""
    return lambda: {
        "for an fp32 payload before scales": rate * 32 / 4,
        "for an fp32 payload with scales": rate * compression_ratio(STORED),
        "for a bf16 payload with scales": rate * compression_ratio(STORED, 16),
    }


RULES: dict[str, Rule] = {
    "S0-004": infiniband_cost,
    "S0-005": ethernet_cost,
    "S0-006": equal_throughput,
    "S0-013": share_of_time,
    "S0-015": mandatory,
    "S0-016": infrastructure_saving,
    "S0-034": Formula(LINK, _effective(400), "Gbit/s", note=PAYLOAD, would_change=WIRE),
    "S0-035": Formula(LINK, _effective(100), "Gbit/s", note=PAYLOAD, would_change=WIRE),
    "S0-036": Formula(
        "effective rate of 100G over that of 400G",
        lambda: {
            "when only the Ethernet side codes an fp32 payload": 100 * compression_ratio(STORED) / 400,
            "when only the Ethernet side codes a bf16 payload": 100 * compression_ratio(STORED, 16) / 400,
            "when both sides code": 100 / 400,
        },
        "x", note=PAYLOAD, would_change=WIRE,
    ),
    "S0-037": Formula(LINK, _effective(25), "Gbit/s", note=PAYLOAD, would_change=WIRE),
    "S0-038": Formula(
        LINK + "; InfiniBand HDR has 200 Gbit/s", _effective(25), "Gbit/s", note=PAYLOAD, would_change=WIRE
    ),
    "S0-039": double_throughput,
    "S0-040": meta_on_ethernet,
    "S3-003": synchronisation,
    "S3-034": sync_at_batch,
}  # fmt: skip

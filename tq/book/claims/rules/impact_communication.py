"""Rules over the share of communication, slower networks with compression, and what fabrics cost."""

from __future__ import annotations

import numpy as np

from tq.book.claims import ledger
from tq.book.claims.formulas import STORED, Figure, Formula, RangeFormula, Readings, ratios
from tq.book.claims.ledger import NOT_CHECKABLE, PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.quant.bounds import compression_ratio
from tq.systems import validation

CHAPTER, COST = "impact-communication", "cost-structure"
DATA_PARALLEL = ("7b", "70b", "175b", "405b")  # runs that send only gradients and pipeline traffic between nodes
RUNS = (*DATA_PARALLEL, "70b-tp16", "8x22b-ep8")
NAMES = {
    "7b": "7B", "70b": "70B", "175b": "175B", "405b": "405B", "70b-tp16": "70B with TP 16",
    "8x22b-ep8": "8x22B with EP 8",
}  # fmt: skip
FABRIC = {
    "switches-and-cables": "a bill of switches and cables", "17-percent": "a share of 17 % of a cluster",
    "20-percent": "a share of 20 % of a cluster",
}  # fmt: skip
DOMINATES = 0.5  # share of a step from which on communication dominates it
EQUAL = 0.02  # share of a step's time that still counts as none


def _claimed_usd() -> tuple[float, float]:
    """InfiniBand and Ethernet as the whitepaper has them, dollars per GPU."""
    infiniband, ethernet = (ledger.claim(name).number() for name in ("S0-004", "S0-005"))
    return infiniband * 1e3, ethernet * 1e3  # from millions per thousand GPUs


def _all(results: Results, pattern: str, names: tuple[str, ...]) -> dict[str, float]:
    return {name: results(CHAPTER, pattern.format(name)) for name in names}


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _spread(values: dict[str, float]) -> str:
    return f"{_percent(min(values.values()))} to {_percent(max(values.values()))}"


def share_of_time(claim: Claim, results: Results) -> Finding:
    """Reproduced if gradient sync, which compression can shorten, takes the claimed share of every modelled run's step
    at 400 Gbit/s per GPU, the network to be replaced. A part holds if all communication does in some run, or gradient
    sync at 25 Gbit/s."""
    low, high = (end / 100 for end in claim.bounds())
    fast = _all(results, "waits/{}/ib-ndr/data-parallel", RUNS)
    slow = _all(results, "waits/{}/eth-25g/data-parallel", DATA_PARALLEL)
    every = _all(results, "waits/{}/ib-ndr/all", RUNS)
    checks = [
        compare(f"{NAMES[name]}, share of gradient sync at 400 Gbit/s", value, low, high)
        for name, value in fast.items()
    ]
    checks += [
        in_part(compare(f"{NAMES[name]}, share of all communication at 400 Gbit/s", value, low, high))
        for name, value in every.items()
    ]
    checks += [
        in_part(compare(f"{NAMES[name]}, share of gradient sync at 25 Gbit/s", value, low, high))
        for name, value in slow.items()
    ]
    text = (
        f"Gradient sync is modelled to take {_spread(fast)} of a step at 400 Gbit/s per GPU, {_spread(slow)} at "
        f"25 in {len(slow)} of {len(RUNS)} runs. All communication takes up to {max(every.values()):.0%} at 400, "
        "mostly of activations."
    )
    change = "A profile of a run on InfiniBand that waits 20 to 55% of its time for gradients."
    return found(claim, checks, text, change, "medium")


def equal_throughput(claim: Claim, results: Results) -> Finding:
    """Reproduced if no modelled run takes more than 2 % longer per step on compressed Ethernet at 100 Gbit/s than on
    uncompressed InfiniBand at 400. A part holds if one run does not."""
    ratio = _all(results, "relative/{}/coded-100g", RUNS)
    checks = [
        compare(f"{NAMES[name]}, step time over that on InfiniBand", each, most=1 + EQUAL)
        for name, each in ratio.items()
    ]
    text = (
        f"On compressed 100 Gbit/s Ethernet a step is modelled to take {ratio['7b']:.3f} (7B) to "
        f"{max(ratio.values()):.1f} times as long as on uncompressed InfiniBand at 400. 70B takes {ratio['70b']:.2f} "
        "times as long; the InfiniBand run sends fp32 gradients."
    )
    return found(claim, checks, text, "The same runs timed on both networks.", "medium")


def double_throughput(claim: Claim, results: Results) -> Finding:
    """Reproduced if a step on compressed 100 Gbit/s Ethernet takes half as long as on InfiniBand at 400. A part holds
    if only the rate of the payload doubles, against fp32 or bf16 gradients."""
    payload = {base: results(CHAPTER, f"effective/100/no-time/{base}") / 400 for base in ("fp32", "bf16")}
    least = results(CHAPTER, "relative/least")
    low, high = claim.bounds()
    checks = [compare("speed of the fastest step over that on InfiniBand", 1 / least, low, high)]
    checks += [in_part(compare(f"payload rate against {b} over InfiniBand's", each, low, high)) for b, each in
               payload.items()]  # fmt: skip
    text = (
        f"On compressed 100 Gbit/s Ethernet a step is modelled to take at least {least:.3f} times as long as on "
        f"uncompressed InfiniBand at 400. The payload rate is {payload['fp32']:.2f} times InfiniBand's against fp32 "
        f"gradients, {payload['bf16']:.2f} times against bf16."
    )
    change = "A run timed on compressed Ethernet that takes half of its time on InfiniBand."
    return found(claim, checks, text, change, "high")


def infiniband_cost(claim: Claim, results: Results) -> Finding:
    """Reproduced if every printed cost of InfiniBand that was found comes to the claimed one per GPU."""
    usd = {words: results(CHAPTER, f"fabric/{key}") for key, words in FABRIC.items()}
    low, high = (1e3 * end for end in claim.bounds())
    checks = [compare(f"dollars per GPU by {words}", each, low, high) for words, each in usd.items()]
    text = (
        f"Printed sources give ${min(usd.values()):,.0f} (bill of materials) to ${max(usd.values()):,.0f} (share of a "
        f"cluster) per GPU for InfiniBand. The whitepaper has ${_claimed_usd()[0]:,.0f} and names no source."
    )
    change = "A bill of materials of InfiniBand with $15,000 per GPU."
    return found(claim, checks, text, change, "low", basis=PRINTED)


def ethernet_cost(claim: Claim, results: Results) -> Finding:
    """Not checkable, because no source prices an Ethernet beside an InfiniBand of its size. The price found for
    InfiniBand is shown as a rough bound."""
    bill, (_, claimed) = results(CHAPTER, "fabric/switches-and-cables"), _claimed_usd()
    text = (
        "No bill of materials for Ethernet beside InfiniBand was found. By a printed bill the InfiniBand of 1,024 H100 "
        f"costs ${bill:,.0f} per GPU, {'less' if bill < claimed else 'more'} than the ${claimed:,.0f} claimed for "
        "Ethernet."
    )
    return Finding(NOT_CHECKABLE, text, "A bill of materials for the Ethernet of a thousand GPUs.")


def infrastructure_saving(claim: Claim, results: Results) -> Finding:
    """Not reproduced if InfiniBand as a whole costs less per GPU than the claimed saving by every printed cost that was
    found. Otherwise it is not checkable, because no source prices an Ethernet beside an InfiniBand of its size."""
    usd = [results(CHAPTER, f"fabric/{key}") for key in FABRIC]
    checks = (compare("largest printed cost of InfiniBand, dollars per GPU", max(usd), 1e3 * claim.bounds()[0]),)
    text = (
        "A printed bill and two printed shares of a cluster's price put all of InfiniBand at "
        f"${min(usd):,.0f} to ${max(usd):,.0f} per GPU, where ${1e3 * claim.number():,.0f} is to be saved. "
        f"{'No source prices' if checks[0].holds else 'That is less than the saving, whatever'} the Ethernet "
        f"in its place{'' if checks[0].holds else ' costs'}."
    )
    change = "Bills of materials for both networks at one cluster size."
    if checks[0].holds:
        return Finding(NOT_CHECKABLE, text, change, checks=checks)
    return found(claim, checks, text, change, "low", "15 - 7", basis=PRINTED)


def mandatory(claim: Claim, results: Results) -> Finding:
    """Reproduced if no large model was trained without InfiniBand."""
    used = results(CHAPTER, "roce/used")
    text = (
        f"Meta trained Llama 3 405B on up to {used:,.0f} GPUs over 400 Gbit/s Ethernet without gradient compression "
        "(printed). The factor of two is the document's $15M over its $7M, which have no source."
    )
    checks = (Check(f"{used:,.0f} GPUs trained without InfiniBand (required: none)", used == 0),)
    change = "A number of GPUs above which every published run used InfiniBand."
    return found(claim, checks, text, change, "medium", basis=PRINTED)


def meta_on_ethernet(claim: Claim, results: Results) -> Finding:
    """Reproduced if as many GPUs as claimed trained the model over RoCE. A part holds if the cluster has as many."""
    size, used = results(CHAPTER, "roce/gpus"), results(CHAPTER, "roce/used")
    low, high = claim.bounds()
    checks = (compare("GPUs that trained", used, low, high), in_part(compare("GPUs of the cluster", size, low, high)))
    text = (
        f"Meta's RoCE cluster has {size:,.0f} GPUs, of which up to {used:,.0f} trained the 405B model (printed). The "
        "cluster has 400 Gbit/s per GPU and no compression, so it is no evidence for slower Ethernet."
    )
    return found(claim, checks, text, "A paper by Meta with 24,000 GPUs in one run.", "medium", basis=PRINTED)


def synchronisation(claim: Claim, results: Results) -> Finding:
    """Reproduced if all communication that a step waits for has the claimed share in every modelled run at 400 Gbit/s
    per GPU. A part holds if it has in some."""
    low, high = (end / 100 for end in claim.bounds())
    fast, slow = _all(results, "waits/{}/ib-ndr/all", RUNS), _all(results, "waits/{}/eth-100g/all", RUNS)
    checks = [
        compare(f"{NAMES[name]}, share of all communication at 400 Gbit/s", value, low, high)
        for name, value in fast.items()
    ]
    text = (
        f"Six modelled runs wait {_spread(fast)} of a step for communication at 400 Gbit/s per GPU, {_spread(slow)} at "
        f"100. Published shares of traffic within layers are {results(CHAPTER, 'published-share/low'):.0%} to "
        f"{results(CHAPTER, 'published-share/high'):.0%}."
    )
    return found(claim, checks, text, "A published run that waits three quarters of its time.", "medium")


def sync_at_batch(claim: Claim, results: Results) -> Finding:
    """Reproduced if gradient sync stays below the claimed share at 32 and at 128 examples, both per replica and over
    all replicas, because the document does not say which it means."""
    most = claim.bounds()[1] / 100
    shares = {label: [results(CHAPTER, f"batch/{label}/{n}") for n in (32, 128)] for label in ("a-replica", "in-all")}
    words = {"a-replica": "per replica", "in-all": "over all replicas"}
    checks = [compare(f"largest share with examples {words[k]}", max(pair), most=most) for k, pair in shares.items()]
    each, every = shares["a-replica"], shares["in-all"]
    text = (
        f"70B on 256 GPUs at 400 Gbit/s is modelled to wait {each[0]:.1%} and {each[1]:.1%} of a step with 32 and 128 "
        f"examples per replica. With as many over all replicas the wait is {every[0]:.0%} and {every[1]:.0%}."
    )
    change = "A statement whether a batch counts the examples of one replica or of all."
    return found(claim, checks, text, change, "medium", "t / (t + c)")


LINK = "link rate * uncompressed bits / (4 + scale bits / 128)"


def _effective(rate: float) -> Readings:
    """The rate in Gbit/s that an uncompressed link would need to carry as much as a compressed one of `rate`."""
    return lambda: {label: rate * float(ratio) for label, ratio in ratios("fp32", "bf16").items()}  # type: ignore[arg-type]


def _link(rate: int, change: str) -> Formula:
    return Formula(
        LINK, _effective(rate),
        f"With bf16 scales, compressed {rate} Gbit/s carry as many gradients as {{0:,.0f}} Gbit/s in fp32 or "
        "{2:,.0f} Gbit/s in bf16 (computed). Mixed precision sends bf16; the codec's time is not counted.",
        change, "Gbit/s",
    )  # fmt: skip


def largest_variables(claim: Claim, results: Results) -> Finding:
    """Reproduced if, in half of six modelled runs or more, gradient sync is the larger part of what GPUs wait for at
    400 Gbit/s, and activations are half of the memory. A part holds if one of the two does."""
    every, own = _all(results, "waits/{}/ib-ndr/all", RUNS), _all(results, "waits/{}/ib-ndr/data-parallel", RUNS)
    larger = sum(own[run] >= every[run] / 2 for run in RUNS)
    full = sum(results(COST, f"memory/{run}/activations") >= 0.5 for run in RUNS)
    checks = (
        compare("runs where gradient sync is the larger part of the waiting", larger, len(RUNS) / 2),
        compare("runs where activations are half of the memory", full, len(RUNS) / 2),
    )
    text = (
        f"In {larger} of {len(RUNS)} modelled runs gradient sync is most of what GPUs wait for at 400 Gbit/s, in "
        f"{full} activations are half of the memory. Waiting takes {_spread(every)} of a step, computing the rest."
    )
    return found(claim, checks, text, claim.would_change, "medium", see=COST)


def communication_dominates(claim: Claim, results: Results) -> Finding:
    """Reproduced if communication takes half of the step or more by the largest published share, or in one of six
    modelled runs at 400 Gbit/s per GPU. A part holds if it does only in a modelled run at 25 Gbit/s."""
    fast, slow = (_all(results, f"waits/{{}}/{link}/all", RUNS) for link in ("ib-ndr", "eth-25g"))
    worst, port = (max(shares, key=lambda run: shares[run]) for shares in (fast, slow))
    published = results(CHAPTER, "published-share/high")
    checks = (
        compare("largest published share", published, DOMINATES),
        compare("largest share of a modelled step at 400 Gbit/s", fast[worst], DOMINATES),
        in_part(compare("largest share of a modelled step at 25 Gbit/s", slow[port], DOMINATES)),
    )
    text = (
        f"Published shares, read in a summary, reach {published:.0%} of the time within layers. {NAMES[worst]} is "
        f"modelled to wait {_percent(fast[worst])} of its step at 400 Gbit/s per GPU, {NAMES[port]} "
        f"{_percent(slow[port])} at 25."
    )
    return found(claim, checks, text, claim.would_change, "low")


WAITING = ("tp", "cp", "ep", "pp", "dp_exposed")  # parts of a step in which GPUs exchange and do not compute


def _growth() -> tuple[float, float]:
    """Exponents over parameters of the GPU-seconds per token that GPUs exchange, and of all others, in the ten weakly
    scaled runs of Megatron-LM from 1.7 to 1,008 billion parameters."""
    size, waits, works = [], [], []
    for row in validation.published():
        if row["id"].startswith("N21-T1-"):
            run = validation.run(row)
            each = float(row["gpus"]) / run.tokens_per_iteration
            size.append(float(validation.shape(row).parameters))
            waits.append(each * sum(float(run.parts[part]) for part in WAITING))
            works.append(each * float(run.iteration_s) - waits[-1])
    slopes = [float(np.polyfit(np.log(size), np.log(values), 1)[0]) for values in (waits, works)]
    return slopes[0], slopes[1]


def _over_infiniband() -> dict[str, Figure]:
    return {
        "only Ethernet compressed, from fp32": 100 * compression_ratio(STORED) / 400,
        "only Ethernet compressed, from bf16": 100 * compression_ratio(STORED, 16) / 400,
        "both compressed, as in the table's first row": 100 / 400,
    }


RULES: dict[str, Rule] = {
    "S0-004": infiniband_cost,
    "S0-005": ethernet_cost,
    "S0-006": equal_throughput,
    "S0-013": share_of_time,
    "S0-015": mandatory,
    "S0-016": infrastructure_saving,
    "S0-034": _link(400, "The gradient type that InfiniBand's effective rate is compared with."),
    "S0-035": _link(100, "The gradient type that the effective rate of 100 Gbit/s is compared with."),
    "S0-036": Formula(
        "effective rate of 100 Gbit/s Ethernet over that of 400 Gbit/s InfiniBand", _over_infiniband,
        "Compressed 100 Gbit/s Ethernet is computed to reach {0:.2f} times InfiniBand's rate against fp32 gradients, "
        "{1:.2f} times against bf16. With both networks compressed, as in the table's first row, Ethernet reaches "
        "{2:.2f} times.",
        "A reason why InfiniBand could not carry compressed gradients.", "x",
    ),
    "S0-037": _link(25, "The gradient type that the effective rate of 25 Gbit/s is compared with."),
    "S0-039": double_throughput,
    "S0-040": meta_on_ethernet,
    "S0-070": largest_variables,
    "S3-003": synchronisation,
    "S3-034": sync_at_batch,
    "S3-073": RangeFormula(
        "slope of log GPU-seconds of communication per token over log parameters, Megatron-LM's ten layouts of 2021; "
        "above 1.05 it is more than in proportion",
        lambda: {"exponent of communication": _growth()[0]},
        "In ten published layouts from 1.7B to 1T parameters, communication per token is modelled to grow with the "
        "power {0:.2f} of the size, and all other time with {1:.2f}.",
        "The exponent of timed communication over parameters, from 1B to 1T.",
        conditions=lambda: {"exponent of all other time": _growth()[1]}, claimed=(1.05, 1e9), within=0.0,
        confidence="medium",
    ),
    "S4-123": communication_dominates,
}  # fmt: skip

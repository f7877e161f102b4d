"""Rules over data-parallel training between hosts, sharded and not."""

from __future__ import annotations

import torch

from tq.book.claims.formulas import Formula
from tq.book.claims.ledger import LIMIT, MEASURED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

CHAPTER, ENGINES, TRAFFIC = "data-parallel-training", "scaling-out", "impact-communication"
RUNS = ("7b", "70b", "175b", "405b", "70b-tp16", "8x22b-ep8")  # that were modelled at 400 Gbit/s
LINEAR = 0.9  # efficiency from which on scaling counts as linear, nearly
FEWER = 7.0  # times fewer bytes of gradients that an engine has to send
MORE = 1.4  # times the bytes of a replicated step; by the books 1.5 (ZeRO)
HIGH = 0.5  # share of a step from which on an overhead is high
SAME = 0.01  # nats that a run may end above another and count as the same


def linear_throughput(claim: Claim, results: Results) -> Finding:
    """Reproduced if two hosts at 1 Gbit/s, which send fp32, keep nine tenths of the speed that they have without any
    exchange. A part holds if each of six modelled runs at 400 Gbit/s per GPU loses at most a tenth of its step to the
    sync of gradients."""
    plain = {rate: 1 - results(CHAPTER, f"share/ddp-fp32/{rate}") for rate in (100, 1000)}
    fast = 1 - max(results(TRAFFIC, f"waits/{run}/ib-ndr/data-parallel") for run in RUNS)
    checks = (
        compare("share of the speed kept at 1 Gbit/s", plain[1000], LINEAR),
        in_part(compare("share of the speed kept at 400 Gbit/s, the least of six runs", fast, LINEAR)),
    )
    text = (
        f"N times the data is the ceiling. Two CPU hosts are measured to reach {plain[100]:.0%} of it at 100 "
        f"Mbit/s and {plain[1000]:.0%} at 1 Gbit/s in fp32. Six runs at 400 Gbit/s are modelled to keep "
        f"{fast:.0%} or more."
    )
    return found(claim, checks, text, "Hosts on a link that is fast for their model.", "high")


def _sharded(results: Results) -> tuple[str, bool, float]:
    """(what was measured with FSDP2, whether its loss stays with its whole interval, how much faster a step is)."""
    gap, half = results(CHAPTER, "gap/fsdp-4"), results(CHAPTER, "gap/fsdp-4/half-width")
    faster = results(CHAPTER, "faster/fsdp-4/100")
    ends = f"FSDP2 ends {gap:+.4f} ± {half:.4f} nats from fp32"
    text = f"in Data-parallel training {ends}, with steps {faster:.2f} times as fast at 100 Mbit/s"
    return text, gap + half < SAME, faster


def sharded_limit(claim: Claim, results: Results) -> Finding:
    """A limit that the authors state of their own code. It is lifted for this book's if FSDP2 trains with it to within
    a hundredth of a nat, interval included, and faster, and if Megatron-core's buckets send seven times fewer bytes of
    gradients with equal ranks."""
    text, same, faster = _sharded(results)
    fewer, equal = results(ENGINES, "fewer/megatron"), results(ENGINES, "equal/megatron")
    sharded, buckets = same and faster > 1, fewer >= FEWER and bool(equal)
    lost = "it is no faster" if same else "the loss is not shown to stay"
    megatron = f"Megatron-core's buckets send {fewer:.1f} times fewer gradient bytes, with equal ranks"
    if sharded and buckets:
        whole = f"Lifted here, on CPUs: {text}. {megatron}. Whole runs need GPUs."
    else:
        whole = f"Stands: {text}, and {'the buckets of Megatron-core fail' if sharded else lost}."
    checks = (
        Check("FSDP2 trains with it, as well and faster", sharded),
        Check("Megatron-core's data-parallel buckets work with it", buckets),
    )
    change = (
        "A whole run under Megatron-LM." if claim.id == "S0-059" else "A report that tests FSDP and Megatron-LM."
    )
    return Finding(LIMIT, whole, change, "medium", checks=checks, basis=MEASURED)


def several_machines(claim: Claim, results: Results) -> Finding:
    """A limit that the authors state of their own runs. It is lifted here if hosts with a network between them train
    alike
    and sooner."""
    sooner, same = results(CHAPTER, "sooner/ddp-4/100"), results(CHAPTER, "whole/same-losses")
    lifted = bool(same) and sooner > 1
    text = (
        f"hosts with links of 100 Mbit/s reach a loss {sooner:.1f} times sooner with four bits than with fp32. They "
        "are CPUs: "
        "several machines with GPUs remain unmeasured."
    )
    checks = (Check(f"hosts end alike and {sooner:.1f} times sooner", lifted),)
    text = f"{'Lifted here, on CPUs' if lifted else 'Stands'}: {text}"
    change = "Two machines with GPUs and a network."
    return Finding(LIMIT, text, change, "medium", checks=checks, basis=MEASURED)


def sharding_overhead(claim: Claim, results: Results) -> Finding:
    """Reproduced if a fully sharded step sends at least 1.4 times the bytes of a replicated one, both in fp32, and
    waits at least half of its time and longer than the replicated one, at 1 Gbit/s. A part holds if one does."""
    sharded, copied = (results(CHAPTER, f"sent/{name}/1000") for name in ("fsdp-fp32", "ddp-fp32"))
    waits, least = (results(CHAPTER, f"share/{name}/1000") for name in ("fsdp-fp32", "ddp-fp32"))
    checks = (
        compare("times the bytes of a replicated step", sharded / copied, MORE),
        compare("share of the step that it waits", waits, max(HIGH, least)),
    )
    text = (
        f"A fully sharded step sends {sharded / copied:.2f} times the bytes of a replicated one; {waits:.0%} of its "
        f"time is beyond a replica's computation, of the other's {least:.0%} (two hosts at 1 Gbit/s, fp32, measured). "
        "NVLink was not measured."
    )
    return found(claim, checks, text, claim.would_change, "low")


def _accumulated(*parts: int) -> float:
    """Largest difference between the gradient of a mean over eight rows and the mean over parts of them, as a share of
    the largest gradient. The numbers are whole, so that nothing is rounded."""
    inputs = torch.arange(24, dtype=torch.float64).reshape(8, 3) % 5 - 2
    wanted, weight = torch.arange(8, dtype=torch.float64) % 3, torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def gradient(rows: slice) -> torch.Tensor:
        return 2 * inputs[rows].T @ (inputs[rows] @ weight - wanted[rows]) / len(inputs[rows])

    ends = [sum(parts[:i]) for i in range(len(parts) + 1)]
    split = sum(gradient(slice(a, b)) for a, b in zip(ends, ends[1:], strict=False)) / len(parts)
    whole = gradient(slice(None))
    return float((split - whole).abs().max() / whole.abs().max())


RULES: dict[str, Rule] = {
    "S0-059": sharded_limit,
    "S1-039": sharding_overhead,
    "S4-046": linear_throughput,
    "S4-124": Formula(
        "mean of the gradients of four parts of eight rows, beside the gradient of all eight",
        lambda: {"largest difference": _accumulated(2, 2, 2, 2)},
        "Equal micro-batches add up to the gradient of the large batch, difference {0:g} (computed). If parts of five "
        "and three rows count alike, the gradient is off by {1:.0%}; batch norms differ too.",
        "A model whose loss is not a mean over its rows.", "of the largest gradient",
        conditions=lambda: {"parts of five and three": _accumulated(5, 3)}, claimed=0.0, within=0.0,
    ),
    "T-019": several_machines,
    "T-020": sharded_limit,
}

"""Rules over data-parallel training between hosts, sharded and not."""

from __future__ import annotations

from tq.book.claims.formulas import SAME
from tq.book.claims.ledger import NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Finding, Results, Rule

CHAPTER = "data-parallel-training"
LINEAR = 0.9  # efficiency from which on scaling counts as linear, nearly


def linear_throughput(claim: Claim, results: Results) -> Finding:
    """N times where the exchange is a small part of a step."""
    plain = {rate: 1 - results(CHAPTER, f"share/ddp-fp32/{rate}") for rate in (100, 1000)}
    coded = 1 - results(CHAPTER, "share/ddp-4/1000")
    good = [value >= LINEAR for value in (*plain.values(), coded)]
    verdict = REPRODUCED if all(good) else PARTLY if any(good) or coded > 0.5 else NOT_REPRODUCED
    text = (
        f"of the speed without any exchange two hosts with fp32 keep {plain[100]:.0%} at 100 Mbit/s and "
        f"{plain[1000]:.0%} at 1 Gbit/s, with four bits {coded:.0%} there: N times is the limit, the link decides"
    )
    return Finding(verdict, text, "A link that is fast for its model.", "high")


def _sharded(claim: Claim, results: Results) -> tuple[str, bool, float]:
    gap, half = results(CHAPTER, "gap/fsdp-4"), results(CHAPTER, "gap/fsdp-4/half-width")
    faster = results(CHAPTER, "faster/fsdp-4/100")
    text = (
        f"with FSDP2's own hook for the reduce-scatter the loss is {gap:+.4f} ± {half:.4f} nats from its fp32, and a "
        f"step {faster:.2f} times as fast at 100 Mbit/s, as weights travel in full. Megatron-LM was not tried"
    )
    return text, gap - half < SAME, faster


def sharded_incompatible(claim: Claim, results: Results) -> Finding:
    """Not if FSDP2 trains with it and gains; in part while it gains next to nothing."""
    text, trains, faster = _sharded(claim, results)
    verdict = REPRODUCED if not trains else NOT_REPRODUCED if faster > 2 else PARTLY
    return Finding(verdict, text, "A run under Megatron-LM.", "medium")


def sharded_untested(claim: Claim, results: Results) -> Finding:
    """A limit of the report: gone here if FSDP2 trains with it and gains, else still there, or in part."""
    text, trains, faster = _sharded(claim, results)
    verdict = REPRODUCED if not trains else PARTLY if faster <= 4 else NOT_REPRODUCED
    return Finding(verdict, "true of the report; here, " + text, "A run under Megatron-LM.", "medium")


def several_machines(claim: Claim, results: Results) -> Finding:
    """A limit of the report: in part gone if hosts with a network between them were measured and gained."""
    sooner, same = results(CHAPTER, "sooner/ddp-4/100"), results(CHAPTER, "whole/same-losses")
    verdict = REPRODUCED if not same else PARTLY if sooner < 20 else NOT_REPRODUCED
    text = (
        f"true of the report; here hosts with links of 100 Mbit/s reach a loss {sooner:.1f} times sooner with four "
        "bits than with fp32, on CPUs: several machines with GPUs remain unmeasured"
    )
    return Finding(verdict, text, "Two machines with GPUs and a network.", "medium")


RULES: dict[str, Rule] = {
    "S0-059": sharded_incompatible,
    "S4-046": linear_throughput,
    "T-019": several_machines,
    "T-020": sharded_untested,
}

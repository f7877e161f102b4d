"""Rules over the results of the chapters between hosts; see ``tq.book.claims``."""

from __future__ import annotations

from tq.book.ledger import NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Facts, Finding, Rule
from tq.book.training_claims import ADAMW, SAME

ALLREDUCE, TRAINING = "compressed-allreduce", "data-parallel-training"
LINEAR = 0.9  # efficiency from which on scaling counts as linear, nearly


def scaling(claim: Claim, facts: Facts) -> Finding:
    """Near-linear if the saving does not depend on the number of ranks."""
    published, ours = (
        {n: facts(ALLREDUCE, f"bytes/fewer/{method}/{n}") for n in (2, 8)} for method in ("all-gather", "ours")
    )
    holds = [saved[8] > LINEAR * saved[2] for saved in (published, ours)]
    verdict = REPRODUCED if all(holds) else PARTLY if any(holds) else NOT_REPRODUCED
    text = f"counted at the interfaces, the published all-gather sends {published[2]:.1f} times fewer bytes than fp32 "
    text += f"with 2 ranks and {published[8]:.1f} times with 8; two legs {ours[2]:.1f} and {ours[8]:.1f} times"
    return Finding(verdict, text, "An all-gather whose bytes a rank do not grow with the ranks.", "high")


def sparse_gradients(claim: Claim, facts: Facts) -> Finding:
    """The ratio of one message is arithmetic; it counts in full only if training bears it."""
    low, high = (float(end) for end in claim.value.split("-"))
    message, gap = facts(ALLREDUCE, "sparse/message"), facts(ADAMW, "gap/top-k-1pc")
    many = facts(ALLREDUCE, "sparse/ranks-64")
    within = low <= message <= high
    verdict = NOT_REPRODUCED if not within else REPRODUCED if gap < SAME else PARTLY
    text = (
        f"a thousandth of the numbers with their places is {message:.0f} times less, a message; with 64 ranks, whose "
    )
    text += (
        f"places differ, {many:.0f} times. Ten times as many, with momentum correction, end {gap:+.2f} nats from the "
    )
    text += "baseline under AdamW here; the source used SGD"
    return Finding(verdict, text, "A run of AdamW that bears one number in a thousand.", "medium")


def quantized_gradients(claim: Claim, facts: Facts) -> Finding:
    """They do if the bytes, the time and the loss all say so."""
    fewer, faster = facts(ALLREDUCE, "bytes/fewer/ours/2"), facts(ALLREDUCE, "faster/ours/100/2/16mib")
    gap, half = facts(TRAINING, "gap/ddp-4"), facts(TRAINING, "gap/ddp-4/half-width")
    good = [fewer > 7, faster > 5, gap - half < SAME]
    verdict = REPRODUCED if all(good) else PARTLY if any(good) else NOT_REPRODUCED
    text = (
        f"between two hosts {fewer:.1f} times fewer bytes than fp32, {faster:.1f} times as fast at 100 Mbit/s, and a "
    )
    text += f"loss {gap:+.4f} ± {half:.4f} nats from fp32, at a million parameters on CPUs"
    return Finding(verdict, text, "The same on GPUs with a link of today.", "medium")


def linear_throughput(claim: Claim, facts: Facts) -> Finding:
    """N times where the exchange is a small part of a step."""
    plain = {rate: 1 - facts(TRAINING, f"share/ddp-fp32/{rate}") for rate in (100, 1000)}
    coded = 1 - facts(TRAINING, "share/ddp-4/1000")
    good = [value >= LINEAR for value in (*plain.values(), coded)]
    verdict = REPRODUCED if all(good) else PARTLY if any(good) or coded > 0.5 else NOT_REPRODUCED
    text = f"of the speed without any exchange two hosts with fp32 keep {plain[100]:.0%} at 100 Mbit/s and "
    text += f"{plain[1000]:.0%} at 1 Gbit/s, with four bits {coded:.0%} there: N times is the limit, the link decides"
    return Finding(verdict, text, "A link that is fast for its model.", "high")


def _sharded(claim: Claim, facts: Facts) -> tuple[str, bool, float]:
    gap, half = facts(TRAINING, "gap/fsdp-4"), facts(TRAINING, "gap/fsdp-4/half-width")
    faster = facts(TRAINING, "faster/fsdp-4/100")
    text = (
        f"with FSDP2's own hook for the reduce-scatter the loss is {gap:+.4f} ± {half:.4f} nats from its fp32, and a "
    )
    text += f"step {faster:.2f} times as fast at 100 Mbit/s, as weights travel in full. Megatron-LM was not tried"
    return text, gap - half < SAME, faster


def sharded_incompatible(claim: Claim, facts: Facts) -> Finding:
    """Not if FSDP2 trains with it and gains; in part while it gains next to nothing."""
    text, trains, faster = _sharded(claim, facts)
    verdict = REPRODUCED if not trains else NOT_REPRODUCED if faster > 2 else PARTLY
    return Finding(verdict, text, "A run under Megatron-LM.", "medium")


def sharded_untested(claim: Claim, facts: Facts) -> Finding:
    """A limit of the report: gone here if FSDP2 trains with it and gains, else still there, or in part."""
    text, trains, faster = _sharded(claim, facts)
    verdict = REPRODUCED if not trains else PARTLY if faster <= 4 else NOT_REPRODUCED
    return Finding(verdict, "true of the report; here, " + text, "A run under Megatron-LM.", "medium")


def several_machines(claim: Claim, facts: Facts) -> Finding:
    """A limit of the report: in part gone if hosts with a network between them were measured and gained."""
    sooner, same = facts(TRAINING, "sooner/ddp-4/100"), facts(TRAINING, "whole/same-losses")
    verdict = REPRODUCED if not same else PARTLY if sooner < 20 else NOT_REPRODUCED
    text = f"true of the report; here hosts with links of 100 Mbit/s reach a loss {sooner:.1f} times sooner with four "
    text += "bits than with fp32, on CPUs: several machines with GPUs remain unmeasured"
    return Finding(verdict, text, "Two machines with GPUs and a network.", "medium")


RULES: dict[str, Rule] = {
    "S0-017": scaling,
    "S3-029": sparse_gradients,
    "S4-100": quantized_gradients,
    "S4-046": linear_throughput,
    "S0-059": sharded_incompatible,
    "T-020": sharded_untested,
    "T-019": several_machines,
}

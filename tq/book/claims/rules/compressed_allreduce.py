"""Rules over bytes and seconds of compressed all-reduces, counted and timed between hosts."""

from __future__ import annotations

from tq.book.claims.formulas import PAYLOAD, SAME, STORED, WIRE, Formula, ratios
from tq.book.claims.ledger import NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Finding, Results, Rule
from tq.systems.collectives import all_gather_bytes, ring_bytes

CHAPTER, ADAMW, TRAINING = "compressed-allreduce", "compressed-adamw", "data-parallel-training"
LINEAR = 0.9  # share of its saving that a method keeps from 2 ranks to 8 if it scales, nearly


def scaling(claim: Claim, results: Results) -> Finding:
    """Near-linear if the saving does not depend on the number of ranks."""
    published, ours = (
        {n: results(CHAPTER, f"bytes/fewer/{method}/{n}") for n in (2, 8)} for method in ("all-gather", "ours")
    )
    holds = [saved[8] > LINEAR * saved[2] for saved in (published, ours)]
    verdict = REPRODUCED if all(holds) else PARTLY if any(holds) else NOT_REPRODUCED
    text = (
        f"counted at the interfaces, the published all-gather sends {published[2]:.1f} times fewer bytes than fp32 "
        f"with 2 ranks and {published[8]:.1f} times with 8; two phases {ours[2]:.1f} and {ours[8]:.1f} times"
    )
    return Finding(verdict, text, "An all-gather whose bytes a rank do not grow with the ranks.", "high")


def sparse_gradients(claim: Claim, results: Results) -> Finding:
    """The ratio of one message is arithmetic; it counts in full only if training bears it."""
    low, high = (float(end) for end in claim.value.split("-"))
    message, gap = results(CHAPTER, "sparse/message"), results(ADAMW, "gap/top-k-1pc")
    many = results(CHAPTER, "sparse/ranks-64")
    within = low <= message <= high
    verdict = NOT_REPRODUCED if not within else REPRODUCED if gap < SAME else PARTLY
    text = (
        f"a thousandth of the numbers with their places is {message:.0f} times less, a message; with 64 ranks, whose "
        f"places differ, {many:.0f} times. Ten times as many, with momentum correction, end {gap:+.2f} nats from the "
        "baseline under AdamW here; the source used SGD"
    )
    return Finding(verdict, text, "A run of AdamW that bears one number in a thousand.", "medium")


def quantized_gradients(claim: Claim, results: Results) -> Finding:
    """They do if the bytes, the time and the loss all say so."""
    fewer, faster = results(CHAPTER, "bytes/fewer/ours/2"), results(CHAPTER, "faster/ours/100/2/16mib")
    gap, half = results(TRAINING, "gap/ddp-4"), results(TRAINING, "gap/ddp-4/half-width")
    good = [fewer > 7, faster > 5, gap - half < SAME]
    verdict = REPRODUCED if all(good) else PARTLY if any(good) else NOT_REPRODUCED
    text = (
        f"between two hosts {fewer:.1f} times fewer bytes than fp32, {faster:.1f} times as fast at 100 Mbit/s, and a "
        f"loss {gap:+.4f} ± {half:.4f} nats from fp32, at a million parameters on CPUs"
    )
    return Finding(verdict, text, "The same on GPUs with a link of today.", "medium")


def _gathered(n: int) -> float:
    """Bytes of an fp32 ring all-reduce over those of an all-gather of codes: 2 (n-1)/n 32 over (n-1) b."""
    return ring_bytes(1, n) / all_gather_bytes(1, n, STORED)


RULES: dict[str, Rule] = {
    "S0-001": Formula(
        "base bits / (4 + scale bits a number)", lambda: ratios("fp32", "bf16"), "x", note=PAYLOAD, confidence="medium",
        would_change=WIRE, see="distortion",
    ),
    "S0-017": scaling,
    "S3-029": sparse_gradients,
    "S4-100": quantized_gradients,
    "T-011": Formula(
        "fp32 ring, 2 (n-1)/n * 32 bits, over an all-gather of codes, (n-1) * 4.25 bits: 64 / (4.25 n)",
        lambda: {f"with {n} workers": _gathered(n) for n in (2, 4, 8, 16)},
        "x", note="An all-gather grows with n; a reduce-scatter of codes would not.", would_change=WIRE,
    ),
}  # fmt: skip

"""Rules over bytes and seconds of compressed all-reduces, counted and timed between hosts."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part

CHAPTER, TRAINING = "compressed-allreduce", "data-parallel-training"
LINEAR = 0.9  # share of its saving that a method keeps from 2 ranks to 8 if it scales, nearly
FEWER = 2.0  # times fewer bytes that count as a reduction


def fewer_bytes(claim: Claim, results: Results) -> Finding:
    """Reproduced if the bytes counted at the network interfaces are fewer by the claimed factor, with 2 and with 8
    ranks, against fp32 and against bf16, because the document also claims mixed precision. A part holds if one of
    these comparisons does."""
    wide = {n: results(CHAPTER, f"bytes/fewer/ours/{n}") for n in (2, 8)}
    half = {n: wide[n] / results(CHAPTER, f"bytes/fewer/bf16/{n}") for n in (2, 8)}
    checks = [compare(f"{n} ranks, fewer bytes than fp32", f, *claim.bounds(), "x") for n, f in wide.items()]
    checks += [compare(f"{n} ranks, fewer bytes than bf16", f, *claim.bounds(), "x") for n, f in half.items()]
    text = (
        f"Our two-phase all-reduce in 4 bits sends {wide[2]:.1f} times fewer bytes than fp32 with two ranks and "
        f"{wide[8]:.1f} times with eight (measured). Against bf16, which most runs send, it is {half[2]:.1f} times."
    )
    return found(claim, checks, text, "A statement that the factor of eight is meant against fp32.", "high")


def all_gather(claim: Claim, results: Results) -> Finding:
    """Reproduced if the published all-gather of quantized values is counted to send fewer bytes than an all-reduce in
    fp32 by the claimed factor, with 2, 4 and 8 ranks. A part holds if it does with one of them."""
    saved = {n: results(CHAPTER, f"bytes/fewer/all-gather/{n}") for n in (2, 4, 8)}
    checks = [compare(f"{n} ranks, fewer bytes than fp32", factor, *claim.bounds(), "x") for n, factor in saved.items()]
    text = (
        f"The published all-gather sends {saved[2]:.1f} times fewer bytes than fp32 with two ranks, {saved[4]:.1f} "
        f"with four and {saved[8]:.1f} with eight (measured). What each rank receives grows with the number of ranks; "
        "a reduce-scatter avoids this."
    )
    return found(claim, checks, text, "A claim that is limited to two ranks.", "high")


def scaling(claim: Claim, results: Results) -> Finding:
    """Reproduced if the published all-gather keeps at least 90% of its byte saving from 2 ranks to 8. A part holds if
    this book's two-phase all-reduce does."""
    published, ours = (
        {n: results(CHAPTER, f"bytes/fewer/{method}/{n}") for n in (2, 8)} for method in ("all-gather", "ours")
    )
    checks = (
        compare("share of its saving that the published all-gather keeps", published[8] / published[2], LINEAR),
        in_part(compare("share that the two-phase all-reduce keeps", ours[8] / ours[2], LINEAR)),
    )
    text = (
        f"The published all-gather sends {published[2]:.1f} times fewer bytes than fp32 with two ranks and "
        f"{published[8]:.1f} times with eight (measured). Our two-phase all-reduce goes from {ours[2]:.1f} to "
        f"{ours[8]:.1f} times; GPU throughput was not measured."
    )
    change = "A published gradient sync whose bytes do not grow with the number of ranks."
    return found(claim, checks, text, change, "medium")


def quantized_gradients(claim: Claim, results: Results) -> Finding:
    """Reproduced if 4-bit gradients are counted to send at least two times fewer bytes between two hosts than bf16. A
    part holds if they do only against fp32. The document says nothing of the loss, which is
    shown beside."""
    wide, faster = results(CHAPTER, "bytes/fewer/ours/2"), results(CHAPTER, "faster/ours/100/2/16mib")
    half, gap = wide / results(CHAPTER, "bytes/fewer/bf16/2"), results.entry(TRAINING, "loss/ddp-4/gap")
    checks = (
        compare("times fewer bytes than bf16", half, FEWER),
        in_part(compare("times fewer bytes than fp32", wide, FEWER)),
    )
    text = (
        f"Between two CPU hosts 4-bit gradient sync sends {wide:.1f} times fewer bytes than fp32, {half:.1f} than "
        f"bf16, and is {faster:.1f} times as fast as fp32 at 100 Mbit/s. The loss ends {gap['value']:+.4f} nats from "
        f"fp32 ({gap['low']:+.3f} to {gap['high']:+.3f}, measured)."
    )
    change = "Quantized gradients that take more than half of the bytes of bf16."
    return found(claim, checks, text, change, "medium")


RULES: dict[str, Rule] = {
    "S0-001": fewer_bytes,
    "S0-017": scaling,
    "S4-100": quantized_gradients,
    "T-011": all_gather,
}

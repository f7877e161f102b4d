"""Rules over bytes and seconds of compressed all-reduces, counted and timed between hosts."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

CHAPTER, ADAMW, TRAINING = "compressed-allreduce", "compressed-adamw", "data-parallel-training"
LINEAR = 0.9  # share of its saving that a method keeps from 2 ranks to 8 if it scales, nearly
SAME = 0.01  # nats; of a claim that names no margin


def fewer_bytes(claim: Claim, results: Results) -> Finding:
    """Bytes counted at the interfaces against fp32, and against the 16 bits of the mixed precision that the document
    claims too, with 2 and 8 ranks."""
    wide = {n: results(CHAPTER, f"bytes/fewer/ours/{n}") for n in (2, 8)}
    half = {n: wide[n] / results(CHAPTER, f"bytes/fewer/bf16/{n}") for n in (2, 8)}
    checks = [compare(f"{n} ranks against fp32", f, *claim.bounds(), "x") for n, f in wide.items()]
    checks += [compare(f"{n} ranks against bf16", f, *claim.bounds(), "x") for n, f in half.items()]
    text = (
        f"Against fp32 {wide[2]:.1f} times fewer bytes with two ranks and {wide[8]:.1f} with eight, counted at the "
        f"interfaces; against bf16, which most runs send, {half[2]:.1f} times."
    )
    return found(claim, checks, text, "A baseline of fp32 beside the eight times.", "high")


def all_gather(claim: Claim, results: Results) -> Finding:
    """Bytes of the published all-gather of codes, counted, against an all-reduce in fp32, with 2, 4 and 8 ranks."""
    saved = {n: results(CHAPTER, f"bytes/fewer/all-gather/{n}") for n in (2, 4, 8)}
    checks = [compare(f"{n} ranks", factor, *claim.bounds(), "x") for n, factor in saved.items()]
    text = (
        f"With two ranks {saved[2]:.1f} times fewer bytes than fp32, with four {saved[4]:.1f} and with eight "
        f"{saved[8]:.1f}: what a rank receives grows with their number. A reduce-scatter of codes would not."
    )
    return found(claim, checks, text, "An all-gather of two ranks alone.", "high")


def scaling(claim: Claim, results: Results) -> Finding:
    """Fewer bytes by as much with 8 ranks as with 2, by the published all-gather; in part by this book's two phases."""
    published, ours = (
        {n: results(CHAPTER, f"bytes/fewer/{method}/{n}") for n in (2, 8)} for method in ("all-gather", "ours")
    )
    checks = (
        compare("share of its saving that the all-gather keeps", published[8] / published[2], LINEAR),
        in_part(compare("that two phases keep", ours[8] / ours[2], LINEAR)),
    )
    text = (
        f"The published all-gather does not scale: {published[2]:.1f} times fewer bytes than fp32 with two ranks, "
        f"{published[8]:.1f} with eight. Two phases keep {ours[8]:.1f} of {ours[2]:.1f}. Throughput of GPUs was not "
        "measured."
    )
    return found(claim, checks, text, "An exchange of theirs whose bytes do not grow with the ranks.", "medium")


def sparse_gradients(claim: Claim, results: Results) -> Finding:
    """One message is as many times smaller; in full only if training bears it to a hundredth of a nat."""
    message, gap = results(CHAPTER, "sparse/message"), results(ADAMW, "gap/top-k-1pc")
    many = results(CHAPTER, "sparse/ranks-64")
    checks = (
        compare("times smaller, a message", message, *claim.bounds()),
        compare("nats from the baseline, with ten times as many", gap, most=SAME),
    )
    text = (
        f"A message of a thousandth of the numbers is {message:.0f} times smaller, with 64 ranks {many:.0f} times. Ten "
        f"times as many end {gap:+.2f} nats from the baseline under AdamW; the source used SGD."
    )
    return found(claim, checks, text, "A run of AdamW that bears one number in a thousand.", "medium")


def quantized_gradients(claim: Claim, results: Results) -> Finding:
    """Quantized gradients send fewer bytes between hosts and end within a hundredth of a nat, interval included."""
    fewer, faster = results(CHAPTER, "bytes/fewer/ours/2"), results(CHAPTER, "faster/ours/100/2/16mib")
    gap, half = results(TRAINING, "gap/ddp-4"), results(TRAINING, "gap/ddp-4/half-width")
    parts = compare("times fewer bytes than fp32", fewer, 2.0), compare("nats, upper end", gap + half, most=SAME)
    checks = (Check(" and ".join(each.text for each in parts), all(each.holds for each in parts)), *map(in_part, parts))
    text = (
        f"Between two hosts {fewer:.1f} times fewer bytes than fp32, {faster:.1f} times as fast at 100 Mbit/s, and a "
        "loss "
        f"{gap:+.4f} ± {half:.4f} nats from fp32 at a million parameters, on CPUs."
    )
    change = "Quantized gradients that end more than a hundredth of a nat away."
    return found(claim, checks, text, change, "medium")


RULES: dict[str, Rule] = {
    "S0-001": fewer_bytes,
    "S0-017": scaling,
    "S3-029": sparse_gradients,
    "S4-100": quantized_gradients,
    "T-011": all_gather,
}

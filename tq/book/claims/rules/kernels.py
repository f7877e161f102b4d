"""Rules over the speed and the exactness of the codec's kernels."""

from __future__ import annotations

from tq.book.claims.formulas import Formula, ratios
from tq.book.claims.ledger import MEASURED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare

CHAPTER = "kernels"
SIZES = ("124M", "355M", "7B", "70B")


def step_overhead(claim: Claim, results: Results) -> Finding:
    """Their step cannot be run; their kernel's published speed, put into a step of each size, gives the factor."""
    factors = {size: results(CHAPTER, f"step/report/{size.lower()}") for size in SIZES}
    checks = [compare(f"step of {size} with their kernel", f, *claim.bounds(), "x") for size, f in factors.items()]
    text = (
        f"The published speed of their kernel gives steps {min(factors.values()):.1f} to {max(factors.values()):.1f} "
        f"times as long (124M to 70B). Ours adds {results(CHAPTER, 'step/measured-share'):.1%} on a CPU, so the factor "
        "belongs to their implementation."
    )
    change = "Their step, timed on their GPU."
    return found(claim, checks, text, change, "low", "(1.125 / r_e + 2 / r_d) eta P / (6 T)")


def bit_exact(claim: Claim, results: Results) -> Finding:
    """Two kernels of this book agree to the claimed decimals, and to the last bit."""
    decimals, bytes_off = results(CHAPTER, "parity/decimals"), results(CHAPTER, "parity/bytes-that-differ")
    checks = (
        compare("decimals", decimals, claim.number()),
        Check(f"share of bytes that differ {bytes_off:.1e}, needed 0", bytes_off == 0),
    )
    text = (
        f"Six decimals hold, bit-exact does not: our CPU kernel agrees with its reference to {decimals:.1f} decimals, "
        f"and {bytes_off:.1e} of the bytes differ, where a number lies on a threshold. Theirs is not published."
    )
    return found(claim, checks, text, "The source of their kernel and of its reference.", "medium", basis=MEASURED)


def kernel_over_python(claim: Claim, results: Results) -> Finding:
    """This book's kernels are as many times faster than plain PyTorch on the same GPU, or more, in both directions."""
    times = {verb: results.on_gpu(CHAPTER, f"over/{verb}/pytorch-reference") for verb in ("encode", "decode")}
    checks = [compare(f"times as fast to {verb}", factor, claim.bounds()[0]) for verb, factor in times.items()]
    text = (
        f"Our kernels encode {times['encode']:.0f} and decode {times['decode']:.0f} times as fast as PyTorch on the "
        "same "
        "GPU. Theirs is not published."
    )
    return found(claim, checks, text, "The source of the two that the report timed.", "medium")


RULES: dict[str, Rule] = {
    "S0-057": step_overhead,
    "T-013": kernel_over_python,
    "T-014": Formula(
        "32 / (4 + scale bits / 128)", lambda: ratios("fp32"),
        "64 MB become {0:.2f} times fewer bytes with bf16 scales and {1:.2f} times fewer with fp32 ones: two digits "
        "are "
        "claimed, so scales count.",
        "A payload whose scales take less than a sixth of a bit a number.", "x", see="distortion",
    ),
    "T-015": bit_exact,
}  # fmt: skip

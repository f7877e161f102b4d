"""Rules over the speed and the exactness of the codec's kernels."""

from __future__ import annotations

from tq.book.claims.formulas import Formula, ratios
from tq.book.claims.ledger import COMPUTED, MEASURED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare

CHAPTER, ON_A_GPU = "kernels", "on-a-gpu"
SIZES = ("124M", "355M", "7B", "70B")


def step_overhead(claim: Claim, results: Results) -> Finding:
    """Reproduced if the printed speed of the report's kernel, put into a model of a training step, makes the step take
    the claimed multiple of its time at every model size. A part holds if it does at one size. The whitepaper's own step
    cannot be run here."""
    factors = {size: results(CHAPTER, f"step/report/{size.lower()}") for size in SIZES}
    checks = [compare(f"modelled step of {size}, times as long", f, *claim.bounds()) for size, f in factors.items()]
    text = (
        f"At the printed speed of the report's kernel a step is modelled to take {min(factors.values()):.1f} to "
        f"{max(factors.values()):.1f} times as long (124M to 70B parameters). With our first hook 124M takes "
        f"{results.on_gpu(ON_A_GPU, 'step/ddp-hook-of-4-bits'):.1f} times as long on an H200, nothing sent."
    )
    change = "A timing of the whitepaper's own step on its GPU."
    return found(claim, checks, text, change, "low", "(1.125 / r_e + 2 / r_d) eta P / (6 T)", basis=COMPUTED)


def bit_exact(claim: Claim, results: Results) -> Finding:
    """Reproduced if two kernels of this book agree to the claimed number of decimals and to the last bit. A part holds
    if they do one of the two. The report's own kernel is not published."""
    decimals, bytes_off = results(CHAPTER, "parity/decimals"), results(CHAPTER, "parity/bytes-that-differ")
    checks = (
        compare("decimals to which decoded values agree", decimals, claim.number()),
        Check(f"share of the packed bytes that differ {bytes_off:.5%} (required: 0)", bytes_off == 0),
    )
    text = (
        f"Our CPU kernel is measured to agree with its PyTorch reference to {decimals:.1f} decimals; {bytes_off:.5%} "
        "of the packed bytes differ. A byte differs where a value lies on a rounding threshold; the report's kernel is "
        "not published."
    )
    change = "The source of the report's kernel and of its reference."
    return found(claim, checks, text, change, "medium", basis=MEASURED)


RULES: dict[str, Rule] = {
    "S0-057": step_overhead,
    "T-014": Formula(
        "32 bits / (4 bits + scale bits / 128)", lambda: ratios("fp32"),
        "A 64 MB payload in fp32 is computed to shrink {0:.2f} times with bf16 scales and {1:.2f} times with fp32 "
        "scales. Exactly 8 times leaves the scales out.",
        "A payload whose fp32 scales take at most a fifth of a bit per element.", "x", see="distortion",
    ),
    "T-015": bit_exact,
}  # fmt: skip

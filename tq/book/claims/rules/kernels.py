"""Rules over the speed and the exactness of the codec's kernels."""

from __future__ import annotations

from tq.book.claims.formulas import TIGHT, WIRE, Formula, ratios
from tq.book.claims.ledger import NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Finding, Results, Rule

CHAPTER = "kernels"


def step_overhead(claim: Claim, results: Results) -> Finding:
    """Their step cannot be run; their kernel's own speed, put into the overhead of a step, must give the factor."""
    low, high = (float(part) for part in claim.value.split("-"))
    factors = {size: results(CHAPTER, f"step/report/{size.lower()}") for size in ("124M", "355M", "7B", "70B")}
    inside = [size for size, factor in factors.items() if low <= factor <= high]
    text = "the speed of the report's kernel gives " + ", ".join(f"{f:.1f}x for {s}" for s, f in factors.items())
    text += (
        " at the tokens a replica that the chapter names; this codec adds "
        f"{results(CHAPTER, 'step/measured-share'):.1%} to a step on a CPU, so the factor belongs to that "
        "implementation. On a GPU ours is not measured"
    )
    verdict = REPRODUCED if len(inside) == len(factors) else PARTLY if inside else NOT_REPRODUCED
    return Finding(verdict, text, "A step timed on a GPU.", "low", "(1.125 / r_e + 2 / r_d) eta P / (6 T)")


def overhead_target(claim: Claim, results: Results) -> Finding:
    """Reached by a device whose codec has the speed that a step of the chapter's models needs; in part by one on which
    the step that was measured stays below the target."""
    target = float(claim.value.strip("<=≤ "))
    share, needed = results(CHAPTER, "step/measured-share"), results(CHAPTER, "rate-for-1.2x")
    speed = results(CHAPTER, "round-trip")
    text = (
        f"holds for the step that was measured, {1 + share:.3f}x; beside an H100 the codec needs up to {needed:.0f} "
        f"billion elements a second, and this device makes {speed:.2g} of a round trip"
    )
    small = 1 + share <= target
    verdict = REPRODUCED if small and speed >= needed else PARTLY if small else NOT_REPRODUCED
    return Finding(verdict, text, "A step timed on a GPU.", "medium")


def bit_exact(claim: Claim, results: Results) -> Finding:
    """Six decimals are measured; bit-exact would mean no difference at all."""
    decimals, bytes_off = results(CHAPTER, "parity/decimals"), results(CHAPTER, "parity/bytes-that-differ")
    agree = decimals >= claim.number()
    text = (
        f"our CPU kernel agrees with the reference to {decimals:.1f} decimals (rms), {bytes_off:.1e} of the code"
        " bytes differ (ties of thresholds): six decimals hold, bit-exact does not. Theirs is not published"
    )
    verdict = REPRODUCED if agree and bytes_off == 0 else PARTLY if agree else NOT_REPRODUCED
    return Finding(verdict, text, "Their source.", "medium")


def kernel_over_python(claim: Claim, results: Results) -> Finding:
    """As many times the speed of plain PyTorch on the same GPU in both directions; in part if in one."""
    times = {verb: results.on_gpu(CHAPTER, f"over/{verb}/pytorch-reference") for verb in ("encode", "decode")}
    speed = results.on_gpu(CHAPTER, "round-trip")
    enough = [factor >= claim.number() for factor in times.values()]
    text = (
        f"this project's kernels encode {times['encode']:.0f} and decode {times['decode']:.0f} times as fast as its "
        f"PyTorch reference on the same GPU, {speed:.3g} billion elements a second of a round trip; theirs is not "
    )
    verdict = REPRODUCED if all(enough) else PARTLY if any(enough) else NOT_REPRODUCED
    return Finding(verdict, text + "published", "Their source.", "medium")


RULES: dict[str, Rule] = {
    "S0-057": step_overhead,
    "S0-060": overhead_target,
    "T-013": kernel_over_python,
    "T-014": Formula(
        "32 / (4 + scale bits / 128)", lambda: ratios("fp32"), "x", TIGHT,
        note="Two digits are claimed, so the scales count.", would_change=WIRE, see="distortion",
    ),
    "T-015": bit_exact,
    "T-018": step_overhead,
}  # fmt: skip

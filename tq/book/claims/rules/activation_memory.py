"""Rules over what activations take, and what coding, recomputing and fusing them saves."""

from __future__ import annotations

from tq.book.claims.formulas import TIGHT, Formula
from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for

CHAPTER = "activation-memory"
GPU = "The same on a GPU."


def activation_factor(claim: Claim, results: Results) -> Finding:
    """A 16-bit tensor by the claimed factor at four bits, and the loss the same as far as it can be told; in part if
    only the whole model, which has larger tensors too, reaches the factor."""
    n = claim.number()
    tensor, wide = results(CHAPTER, "ratio/tensor/bf16-scales"), results(CHAPTER, "ratio/tensor/fp32-scales")
    whole, again = results(CHAPTER, "ratio/4-bits"), results(CHAPTER, "ratio/4-bits-recompute")
    gap = results.entry(CHAPTER, "gap-mean/4-bits")
    costs = results(CHAPTER, "gap-mean/4-bits-recompute")
    low, high = (gap.get(end, gap["value"]) for end in ("low", "high"))
    same = low <= 0
    text = (
        f"at four bits a 16-bit tensor falls by {tensor:.2f} with bf16 scales and {wide:.2f} with fp32 ones, all "
        f"that a small model keeps by {whole:.2f} (its fp32 tensors fall further) at {gap['value']:+.4f} "
        f"({low:+.4f} to {high:+.4f}) bit a byte of loss, and with cheap results computed "
        f"again by {again:.1f} at {costs:+.4f}"
    )
    return Finding(verdict_for(tensor >= n and same, whole >= n and same), text, "Peak memory of a GPU.", "medium")


def linear_factor(claim: Claim, results: Results) -> Finding:
    """The input that a linear layer keeps, by its type."""
    n, half, full = (
        claim.number(),
        results(CHAPTER, "compiled/per-tensor-bf16"),
        results(CHAPTER, "compiled/per-tensor"),
    )
    text = (
        f"what this project's linear layer keeps of its input is {half:.2f} times smaller in bf16 and {full:.2f} in "
        "float32, also when compiled; the rest of a model stays"
    )
    return Finding(verdict_for(half >= n, full >= n), text, GPU, "medium")


def activation_share(claim: Claim, results: Results) -> Finding:
    """All published shapes inside the range, with and without selective recomputation; in part if the ranges meet."""
    low, high = (value / 100 for value in claim.ends())
    ends = {
        kind: [results(CHAPTER, f"share-of-memory/{kind}/{end}") for end in ("lowest", "highest")]
        for kind in ("none", "selective")
    }
    inside = all(low <= value <= high for pair in ends.values() for value in pair)
    meets = any(pair[0] <= high and pair[1] >= low for pair in ends.values())
    text = (
        "by the formula of Korthikanti et al. over their four models activations take "
        f"{ends['none'][0]:.0%} to {ends['none'][1]:.0%} without recomputation and "
        f"{ends['selective'][0]:.0%} to {ends['selective'][1]:.0%} with the selective kind and "
        "sequence parallelism"
    )
    return Finding(verdict_for(inside, meets), text, "Measured shares of a published run.", "medium")


def checkpoint_saving(claim: Claim, results: Results) -> Finding:
    """Inside the range; above it the claim is too modest, which is agreement in part."""
    low, high = (value / 100 for value in claim.ends())
    saved = results(CHAPTER, "checkpoint/blocks-reduction")
    text = f"a checkpoint of every block saves {saved:.0%} of what the blocks keep after the forward pass"
    return Finding(verdict_for(low <= saved <= high, saved > high), text, "Coarser or finer checkpoints.", "high")


def checkpoint_time(claim: Claim, results: Results) -> Finding:
    """A whole step within five points of the range; in part within fifteen."""
    low, high = (value / 100 for value in claim.ends())
    added = results(CHAPTER, "step/checkpoint-of-every-block") - 1

    def near(margin: float) -> bool:
        return low - margin <= added <= high + margin

    text = (
        f"a checkpoint of every block adds {added:.0%} to a whole step of 25 million parameters on a CPU; the "
        "arithmetic is 1/3 where the forward pass runs once more, 2/9 as PyTorch runs it, which stops before a "
        "block's last product"
    )
    return Finding(verdict_for(near(0.05), near(0.15)), text, GPU, "low", "(1 + 1 + 2) / (1 + 2) - 1")


def compute_for_memory(claim: Claim, results: Results) -> Finding:
    """Ten times at the peak of 24 and 96 blocks, for the claimed time to eight points; in part if what waits for the
    backward pass falls by eight."""
    factor, added = results(CHAPTER, "checkpoint/blocks-factor"), results(CHAPTER, "step/checkpoint-of-every-block") - 1
    peaks = [factor * depth / (factor + depth) for depth in (24, 96)]  # one block is whole while it runs again
    text = (
        f"what blocks keep after the forward pass falls by {factor:.1f} with a checkpoint of each, their peak by "
        f"{peaks[0]:.1f} at 24 blocks and {peaks[1]:.1f} at 96, for {added:.0%} more time on a CPU"
    )
    holds = min(peaks) >= 10 and abs(added - claim.ends()[0] / 100) <= 0.08
    return Finding(verdict_for(holds, factor >= 8), text, GPU, "medium")


def square_root(claim: Claim, results: Results) -> Finding:
    """Sixteen times the depth may cost four times the peak, to a quarter; twice that is agreement in part."""
    grown = results(CHAPTER, "checkpoint/peak-at-16-times-the-depth")
    text = (
        f"at 16 times the depth the peak grows {grown:.2f} times if the distance of checkpoints is chosen for the "
        "depth; one for every block grows linearly"
    )
    return Finding(verdict_for(3 <= grown <= 5, grown <= 8), text, "Another placement.", "high", "sqrt(16) = 4")


def quadratic_attention(claim: Claim, results: Results) -> Finding:
    """Doubling the context: four times, by the plain and by the fused kernel; in part if only the plain one does."""
    plain, fused = results(CHAPTER, "attention/doubling/math"), results(CHAPTER, "attention/doubling/fused")
    text = (
        f"what attention keeps grows {plain:.2f} times with twice the context without a fused kernel and {fused:.2f} "
        "times with one. Its compute was not measured here"
    )
    return Finding(verdict_for(plain >= 3.5 and fused >= 3.5, plain >= 3.5), text, GPU, "high")


def fused_saving(claim: Claim, results: Results) -> Finding:
    """Every measured context inside the range; in part if some are."""
    low, high = claim.ends()
    factors = {t: results(CHAPTER, f"attention/fused-saves/{t}") for t in (512, 1024, 2048)}
    inside = [low <= factor <= high for factor in factors.values()]
    text = "a factor that grows with the context: " + ", ".join(f"{f:.1f} at {t}" for t, f in factors.items())
    return Finding(verdict_for(all(inside), any(inside)), text, "A GPU's fused kernel.", "medium")


RULES: dict[str, Rule] = {
    "S0-002": activation_factor,
    "S0-014": activation_share,
    "S1-010": checkpoint_saving,
    "S1-011": checkpoint_time,
    "S3-027": checkpoint_time,
    "S3-047": fused_saving,
    "S3-049": compute_for_memory,
    "S3-050": Formula(
        "fp32: 4 + 4 + 8 bytes; mixed: 2 + 2 + 4 (master) + 8",
        lambda: {"for activations": 32 / 16, "for weights, gradients and optimizer": (4 + 4 + 8) / (2 + 2 + 4 + 8)},
        "x", TIGHT, would_change="Training without a master copy of the weights.",
    ),
    "S3-053": quadratic_attention,
    "S4-055": Formula(
        "2 (bf16 weight) + 2 (bf16 gradient) + 4 + 4 (fp32 moments)",
        lambda: {"as the sum of the parts": 2.0 + 2 + 4 + 4},
        "bytes a parameter", TIGHT, claimed=2.0 + 2 + 8, note="Without an fp32 master copy of the weights.",
    ),
    "S4-056": Formula(
        "12, + 4 for an fp32 master copy, + 4 for fp32 gradients",
        lambda: {
            "for the listed parts": (12.0, 12.0), "with a master copy, and fp32 gradients besides": (16.0, 20.0)
        },
        "bytes a parameter", TIGHT, claimed=Claim.ends,
    ),
    "S4-057": Formula(
        "70e9 * bytes a parameter", lambda: {f"at {b} bytes a parameter": 70e9 * b / 1e12 for b in (20, 16, 12)},
        "TB", 0.05,
    ),
    "S4-058": checkpoint_time,
    "S4-059": square_root,
    "S4-063": quadratic_attention,
    "T-016": linear_factor,
}  # fmt: skip

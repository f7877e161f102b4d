"""Rules over the results of the chapters on memory in training; see ``tq.book.claims``."""

from __future__ import annotations

from collections.abc import Sequence

from tq.book.ledger import Claim, Facts, Finding, NotRecorded, Rule, graded

MEMORY, STATE = "activation-memory", "optimizer-state"
EIGHT = ("8-8", "bitsandbytes-8-bit", "torchao-8-bit")  # the states of 8 bits that were counted
GPU = "The same on a GPU."


def activation_factor(claim: Claim, facts: Facts) -> Finding:
    """A 16-bit tensor by the claimed factor at four bits, and the loss the same as far as it can be told; in part if
    only the whole model, which has larger tensors too, reaches the factor."""
    n = claim.number()
    tensor, wide = facts(MEMORY, "ratio/tensor/bf16-scales"), facts(MEMORY, "ratio/tensor/fp32-scales")
    whole, again = facts(MEMORY, "ratio/4-bits"), facts(MEMORY, "ratio/4-bits-recompute")
    gap = facts.entry(MEMORY, "gap-mean/4-bits")
    costs = facts(MEMORY, "gap-mean/4-bits-recompute")
    low, high = (gap.get(end, gap["value"]) for end in ("low", "high"))
    same = low <= 0
    text = f"at four bits a 16-bit tensor falls by {tensor:.2f} with bf16 scales and {wide:.2f} with fp32 ones, all "
    text += f"that a small model keeps by {whole:.2f} (its fp32 tensors fall further) at {gap['value']:+.4f} "
    text += f"({low:+.4f} to {high:+.4f}) bit a byte of loss, and with cheap results computed "
    text += f"again by {again:.1f} at {costs:+.4f}"
    return Finding(graded(tensor >= n and same, whole >= n and same), text, "Peak memory of a GPU.", "medium")


def linear_factor(claim: Claim, facts: Facts) -> Finding:
    """The input that a linear layer keeps, by its type."""
    n, half, full = claim.number(), facts(MEMORY, "compiled/per-tensor-bf16"), facts(MEMORY, "compiled/per-tensor")
    text = f"what this project's linear layer keeps of its input is {half:.2f} times smaller in bf16 and {full:.2f} in "
    text += "float32, also when compiled; the rest of a model stays"
    return Finding(graded(half >= n, full >= n), text, GPU, "medium")


def activation_share(claim: Claim, facts: Facts) -> Finding:
    """All published shapes inside the range, with and without selective recomputation; in part if the ranges meet."""
    low, high = (value / 100 for value in claim.ends())
    ends = {
        kind: [facts(MEMORY, f"share-of-memory/{kind}/{end}") for end in ("lowest", "highest")]
        for kind in ("none", "selective")
    }
    inside = all(low <= value <= high for pair in ends.values() for value in pair)
    meets = any(pair[0] <= high and pair[1] >= low for pair in ends.values())
    text = "by the formula of Korthikanti et al. over their four models activations take "
    text += f"{ends['none'][0]:.0%} to {ends['none'][1]:.0%} without recomputation and "
    text += f"{ends['selective'][0]:.0%} to {ends['selective'][1]:.0%} with the selective kind and "
    text += "sequence parallelism"
    return Finding(graded(inside, meets), text, "Measured shares of a published run.", "medium")


def checkpoint_saving(claim: Claim, facts: Facts) -> Finding:
    """Inside the range; above it the claim is too modest, which is agreement in part."""
    low, high = (value / 100 for value in claim.ends())
    saved = facts(MEMORY, "checkpoint/blocks-reduction")
    text = f"a checkpoint of every block saves {saved:.0%} of the bytes that the blocks keep, counted"
    return Finding(graded(low <= saved <= high, saved > high), text, "Coarser or finer checkpoints.", "high")


def checkpoint_time(claim: Claim, facts: Facts) -> Finding:
    """Within five points of the range; in part within fifteen. A third of the operations is arithmetic."""
    low, high = (value / 100 for value in claim.ends())
    added = facts(MEMORY, "time/bare-checkpoint") - 1

    def near(margin: float) -> bool:
        return low - margin <= added <= high + margin

    text = (
        f"a checkpoint of every block adds {added:.0%} to a step on a CPU; the arithmetic is 1/3, as the forward pass "
    )
    return Finding(graded(near(0.05), near(0.15)), text + "runs once more", GPU, "low", "(1 + 1 + 2) / (1 + 2) - 1")


def compute_for_memory(claim: Claim, facts: Facts) -> Finding:
    """Ten times less memory for about a third more time; in part without the time, or with eight times."""
    factor, added = facts(MEMORY, "checkpoint/blocks-factor"), facts(MEMORY, "time/bare-checkpoint") - 1
    text = f"what blocks keep falls by {factor:.1f} with a checkpoint of each, for {added:.0%} more time on a CPU"
    return Finding(graded(factor >= 10 and added <= 0.38, factor >= 8), text, GPU, "medium")


def square_root(claim: Claim, facts: Facts) -> Finding:
    """Sixteen times the depth may cost four times the peak, to a quarter; twice that is agreement in part."""
    grown = facts(MEMORY, "checkpoint/peak-at-16-times-the-depth")
    text = f"at 16 times the depth the peak grows {grown:.2f} times if the distance of checkpoints is chosen for the "
    text += "depth; one for every block grows linearly"
    return Finding(graded(3 <= grown <= 5, grown <= 8), text, "Another placement.", "high", "sqrt(16) = 4")


def quadratic_attention(claim: Claim, facts: Facts) -> Finding:
    """Doubling the context: four times, by the plain and by the fused kernel; in part if only the plain one does."""
    plain, fused = facts(MEMORY, "attention/doubling/math"), facts(MEMORY, "attention/doubling/fused")
    text = (
        f"what attention keeps grows {plain:.2f} times with twice the context without a fused kernel and {fused:.2f} "
    )
    text += "times with one. Its compute was not measured here"
    return Finding(graded(plain >= 3.5 and fused >= 3.5, plain >= 3.5), text, GPU, "high")


def fused_saving(claim: Claim, facts: Facts) -> Finding:
    """Every measured context inside the range; in part if some are."""
    low, high = claim.ends()
    factors = {t: facts(MEMORY, f"attention/fused-saves/{t}") for t in (512, 1024, 2048)}
    inside = [low <= factor <= high for factor in factors.values()]
    text = "a factor that grows with the context: " + ", ".join(f"{f:.1f} at {t}" for t, f in factors.items())
    return Finding(graded(all(inside), any(inside)), text, "A GPU's fused kernel.", "medium")


def _measured(facts: Facts, what: str, names: Sequence[str]) -> dict[str, float]:
    """What was recorded of ``what``; the first name must be, others may be missing."""
    found = {names[0]: facts(STATE, f"{what}/{names[0]}")}
    for name in names[1:]:
        try:
            found[name] = facts(STATE, f"{what}/{name}")
        except NotRecorded:
            continue
    return found


def eight_bit_saving(claim: Claim, facts: Facts) -> Finding:
    """Each 8-bit state that was counted must save the claimed share of the optimizer's bytes, to two points."""
    claimed, saved = claim.number() / 100, _measured(facts, "saving", EIGHT)
    near = [abs(share - claimed) <= 0.02 for share in saved.values()]
    text = "counted on a real model, the optimizer's state shrinks by "
    text += ", ".join(f"{share:.1%} ({name})" for name, share in saved.items())
    text += f"; of all 16 bytes a parameter of mixed precision it is a factor of {facts(STATE, 'whole/8-8'):.2f}"
    change = "A model of many small tensors, which stay in fp32."
    return Finding(graded(all(near), any(near)), text, change, "high", "1 - (1 + 4/256) / 4")


def eight_bit_accuracy(claim: Claim, facts: Facts) -> Finding:
    """Accuracy is read as held-out loss: every gap with its interval below the claim; in part some mean."""
    limit = claim.ends()[1] / 100
    gaps, worst = _measured(facts, "relative", EIGHT), _measured(facts, "relative-worst", EIGHT)
    sure = set(worst) >= set(gaps) and all(value < limit for value in worst.values())
    text = "held-out loss against fp32 states changes by "
    text += ", ".join(f"{gaps[n]:+.2%} ({n}; at most {worst[n]:.2%} with its interval)" for n in gaps if n in worst)
    text += ". One small model; the source names no measure of accuracy"
    return Finding(graded(sure, any(abs(g) < limit for g in gaps.values())), text, "A longer or larger run.", "low")


def eight_bit_factor(claim: Claim, facts: Facts) -> Finding:
    """The state's factor or that of all bytes within a tenth of the claim; in part if the claim lies between them."""
    claimed, state, whole = claim.ends()[0], facts(STATE, "ratio/8-8"), facts(STATE, "whole/8-8")
    close = any(abs(factor / claimed - 1) <= 0.1 for factor in (state, whole))
    text = f"the optimizer's state shrinks by {state:.2f}x, all 16 bytes of mixed precision by {whole:.2f}x; "
    text += "the claim is one of them" if close else f"{claimed:g}x is neither"
    verdict = graded(close, whole < claimed < state)
    return Finding(verdict, text, "A statement of what is counted.", "high", "8 / 2.06; 16 / 10.06")


def smaller_states(claim: Claim, facts: Facts) -> Finding:
    """Each named optimizer that was counted keeps less than AdamW."""
    adam = facts(STATE, "bytes/fp32")
    kept = _measured(facts, "bytes", ("adafactor", "sgd-with-momentum", "bitsandbytes-lion"))
    less = [width < 0.9 * adam for width in kept.values()]
    text = f"bytes a parameter beside AdamW's {adam:.3g}: " + ", ".join(f"{w:.3g} ({n})" for n, w in kept.items())
    return Finding(graded(all(less), any(less)), text, "Models without matrices.", "high")


RULES: dict[str, Rule] = {
    "S0-002": activation_factor,
    "T-016": linear_factor,
    "S0-014": activation_share,
    "S1-010": checkpoint_saving,
    "S1-011": checkpoint_time,
    "S3-027": checkpoint_time,
    "S4-058": checkpoint_time,
    "S3-049": compute_for_memory,
    "S4-059": square_root,
    "S4-063": quadratic_attention,
    "S3-053": quadratic_attention,
    "S3-047": fused_saving,
    "S1-012": eight_bit_saving,
    "S1-013": eight_bit_accuracy,
    "S4-067": eight_bit_factor,
    "S4-068": smaller_states,
}

"""Rules over what activations take, and what coding, recomputing and fusing them saves."""

from __future__ import annotations

from tq.book.claims.formulas import Formula, RangeFormula
from tq.book.claims.ledger import UNDECIDED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

CHAPTER = "activation-memory"
CONTEXTS = (512, 1024, 2048)  # tokens, at which attention was measured
MEASURED_BLOCK = "step/checkpoint-of-every-block"


def activation_factor(claim: Claim, results: Results) -> Finding:
    """A 16-bit tensor shrinks as claimed, and so does all that a model keeps; and the loss is equivalent by two
    one-sided
    tests at a margin of .003 nats. Undecided where both shrink so, the tests do not show it and the interval holds an
    end of the margin."""
    tensor, wide = results(CHAPTER, "ratio/tensor/bf16-scales"), results(CHAPTER, "ratio/tensor/fp32-scales")
    whole, same = results(CHAPTER, "ratio/4-bits"), bool(results(CHAPTER, "loss/4-bits/equivalent"))
    gap = results.entry(CHAPTER, "loss/4-bits/gap")
    low, high = claim.bounds()
    checks = (
        compare("times smaller, a 16-bit tensor with fp32 scales", wide, low, high),
        compare("times smaller, all that a model keeps", whole, low, high),
        Check(f"loss {gap['value']:+.4f} nats, equivalent within .003", same),
    )
    text = (
        f"A 16-bit activation shrinks {wide:.1f} to {tensor:.1f} times, as scales are stored too, all that a small "
        "model "
        f"keeps {whole:.1f} times, at {gap['value']:+.4f} nats ({gap['low']:+.4f} to {gap['high']:+.4f}). Peak memory "
        "of a "
        "GPU is not measured."
    )
    change = "Peak memory and loss of a large model on a GPU."
    open_end = any(gap["low"] < end < gap["high"] for end in (-0.003, 0.003))
    if not same and open_end and checks[0].holds and checks[1].holds:
        return Finding(UNDECIDED, text, change, "medium", checks=checks)
    return found(claim, checks, text, change, "medium")


def linear_factor(claim: Claim, results: Results) -> Finding:
    """The input that a linear layer of this book keeps in bf16, as mixed precision has it, is as many times smaller."""
    half, full = results(CHAPTER, "compiled/per-tensor-bf16"), results(CHAPTER, "compiled/per-tensor")
    text = (
        f"What our linear layer keeps of its input is {half:.2f} times smaller in bf16 and {full:.2f} times in "
        "float32, also "
        "when compiled. The rest of a model stays; theirs is not public."
    )
    checks = (compare("times smaller in bf16", half, *claim.bounds()),)
    return found(claim, checks, text, "The source of TurboQuantLinear.", "medium")


def activation_share(claim: Claim, results: Results) -> Finding:
    """The four published models of Korthikanti et al. lie in the range without recomputation and with the selective
    kind;
    in part if some do."""
    low, high = (value / 100 for value in claim.bounds())
    kinds = {"none": "without recomputation", "selective": "with the selective kind"}
    ends = {
        kind: [results(CHAPTER, f"share-of-memory/{kind}/{end}") for end in ("lowest", "highest")] for kind in kinds
    }
    checks = [
        compare(f"{end} share {kinds[kind]}", value, low, high)
        for kind, pair in ends.items() for end, value in zip(("lowest", "highest"), pair, strict=True)
    ]  # fmt: skip
    text = (
        f"By the formula of Korthikanti et al. over their four models activations take {ends['none'][0]:.0%} to "
        f"{ends['none'][1]:.0%} without recomputation, {ends['selective'][0]:.0%} to {ends['selective'][1]:.0%} with "
        "the "
        "selective kind. No model is named."
    )
    return found(claim, checks, text, "Model, batch and recomputation that are meant.", "medium")


def checkpoint_saving(claim: Claim, results: Results) -> Finding:
    """A checkpoint of every block saves a share in the range; above it the claim is too modest and holds in part."""
    low, high = (value / 100 for value in claim.bounds())
    saved = results(CHAPTER, "checkpoint/blocks-reduction")
    checks = (compare("share saved", saved, low, high), in_part(compare("the same or more", saved, low)))
    text = (
        f"Too modest: a checkpoint of every block saves {saved:.0%} of what blocks keep after the forward pass. One of "
        "selected activations, of which the text speaks, saves less."
    )
    return found(claim, checks, text, "Checkpoints of selected activations alone.", "high")


def checkpoint_time(claim: Claim, results: Results) -> Finding:
    """What a checkpoint of every block adds to a step lies in the range with its interval; in part with its median."""
    low, high = (value / 100 for value in claim.bounds())
    entry = results.entry(CHAPTER, MEASURED_BLOCK)
    added, ends = entry["value"] - 1, [entry.get(end, entry["value"]) - 1 for end in ("low", "high")]
    checks = (
        Check(f"share added {ends[0]:.1%} to {ends[1]:.1%}, needed within {low:.1%} to {high:.1%}",
              low <= ends[0] and ends[1] <= high),
        in_part(compare("median share added", added, low, high)),
    )  # fmt: skip
    text = (
        f"A checkpoint of every block adds {added:.0%} ({ends[0]:.0%} to {ends[1]:.0%}) to a step of 25 million "
        "parameters "
        "on a CPU. Arithmetic has a third, or 2/9 as PyTorch stops before a block's last product."
    )
    return found(claim, checks, text, "The same step on a GPU.", "low", "(1 + 1 + 2) / (1 + 2) - 1")


def compute_for_memory(claim: Claim, results: Results) -> Finding:
    """The peak of 24 and 96 blocks falls tenfold for three tenths more time; in part if what waits for the backward
    pass
    does."""
    factor, added = results(CHAPTER, "checkpoint/blocks-factor"), results(CHAPTER, MEASURED_BLOCK) - 1
    peaks = {depth: factor * depth / (factor + depth) for depth in (24, 96)}  # one block is whole while it runs again
    enough = min(peaks.values()) >= 9.0 and added <= 0.33
    checks = (
        Check(f"peak {min(peaks.values()):.1f} times lower or more for {added:.0%}, needed 9 for at most 33 %", enough),
        in_part(compare("times fewer bytes after the forward pass", factor, 9.0)),
    )
    text = (
        f"What blocks keep after the forward pass falls {factor:.1f} times, their peak {peaks[24]:.1f} times at 24 "
        "blocks "
        f"and {peaks[96]:.1f} at 96, for {added:.0%} more time on a CPU."
    )
    return found(claim, checks, text, "Peak memory of such a step on a GPU.", "medium")


def square_root(claim: Claim, results: Results) -> Finding:
    """Sixteen times the depth costs four times the peak, to a quarter."""
    grown = results(CHAPTER, "checkpoint/peak-at-16-times-the-depth")
    text = (
        f"At sixteen times the depth the peak grows {grown:.2f} times, if the distance of checkpoints is chosen for "
        "the "
        "depth. One for every block grows linearly."
    )
    return found(claim, (compare("times the peak", grown, 3, 5),), text, "Checkpoints at a fixed distance.", "high",
                 "sqrt(16) = 4")  # fmt: skip


def _doubling(fused_too: bool, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Twice the context makes attention keep four times as much, to a tenth: in the plain kernel, and in a fused
        one where the claim does not speak of the plain one alone."""
        plain, fused = results(CHAPTER, "attention/doubling/math"), results(CHAPTER, "attention/doubling/fused")
        checks = [compare("times as much, plain", plain, 3.6, 4.4)]
        checks += [compare("times as much, fused", fused, 3.6, 4.4)] if fused_too else []
        text = (
            f"What attention keeps grows {plain:.2f} times with twice the context in the plain kernel and {fused:.2f} "
            "times "
            "in a fused one. Its compute is counted, not measured."
        )
        return found(claim, checks, text, change, "high")

    return rule


def fused_saving(claim: Claim, results: Results) -> Finding:
    """A fused kernel saves a factor in the range at every context that was measured: the document names none."""
    factors = {tokens: results(CHAPTER, f"attention/fused-saves/{tokens}") for tokens in CONTEXTS}
    checks = [compare(f"times less at {tokens} tokens", f, *claim.bounds()) for tokens, f in factors.items()]
    text = (
        "The factor grows with the context, " + ", ".join(f"{f:.1f} at {t:,} tokens" for t, f in factors.items())
        + ": it is ten to twenty from about a thousand tokens to about two and a half thousand."
    )  # fmt: skip
    return found(claim, checks, text, "The context that FlashAttention's figure is of.", "medium")


RULES: dict[str, Rule] = {
    "S0-002": activation_factor,
    "S0-014": activation_share,
    "S1-010": checkpoint_saving,
    "S1-011": checkpoint_time,
    "S3-047": fused_saving,
    "S3-049": compute_for_memory,
    "S3-050": Formula(
        "fp32: 4 + 4 + 8 bytes; mixed: 2 + 2 + 4 (master) + 8",
        lambda: {"activations": 32 / 16, "weights, gradients and optimizer": (4 + 4 + 8) / (2 + 2 + 4 + 8)},
        "Activations halve; weights, gradients and optimizer state with a master copy take as much as before, {1:.0f} "
        "times. Which memory is meant is not said.",
        "Training without a master copy of the weights.", "x", claimed=2.0, within=0.1,
    ),
    "S3-053": _doubling(True, "A fused kernel whose memory is quadratic too."),
    "S4-055": Formula(
        "2 (bf16 weight) + 2 (bf16 gradient) + 4 + 4 (fp32 moments)", lambda: {"the sum": 2.0 + 2 + 4 + 4},
        "Weights, gradients and two fp32 moments are {0:.0f} bytes a parameter, without a master copy.",
        "Another width of gradients or moments in its list.", "bytes a parameter", claimed=2.0 + 2 + 8, within=0.0,
    ),
    "S4-056": RangeFormula(
        "2 + 2 + 8, + 4 for an fp32 master copy, + 4 for fp32 gradients",
        lambda: {"its own list": 12.0, "with a master copy": 16.0},
        "Its own list comes to {0:.0f} bytes a parameter; a master copy in fp32, which it does not list, makes "
        "{1:.0f}, "
        "fp32 gradients 20.",
        "A master copy in the list.", "bytes a parameter", within=0.1,
    ),
    "S4-057": Formula(
        "70e9 * bytes a parameter",
        lambda: {"in full precision, 16 bytes": 70e9 * 16 / 1e12, "by its list, 12 bytes": 70e9 * 12 / 1e12},
        "In full precision, 16 bytes a parameter, {0:.2f} TB, about what is claimed; its list of bf16 training comes "
        "to "
        "{1:.2f}. 1.4 takes 20 bytes.",
        "A list that comes to twenty bytes a parameter.", "TB",
    ),
    "S4-058": Formula(
        "(1 + 1 + 2) / (1 + 2) - 1", lambda: {"the forward pass once more": 100 / 3},
        "One forward pass more is a third more compute; PyTorch stops before a block's last product, {1:.0f} %. The "
        "time "
        "is another claim.",
        "A backward pass that does not cost twice a forward pass.", "%",
        conditions=lambda: {"as PyTorch runs it": 200 / 9},
    ),
    "S4-059": square_root,
    "S4-063": _doubling(False, "A plain kernel that does not write its scores."),
    "T-016": linear_factor,
}  # fmt: skip

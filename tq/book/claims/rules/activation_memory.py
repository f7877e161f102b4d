"""Rules over what activations take, and what quantizing, recomputing and fusing them saves."""

from __future__ import annotations

import math

from tq.book.claims.formulas import Figure, Formula, RangeFormula
from tq.book.claims.ledger import COMPUTED, UNDECIDED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems import Transformer

CHAPTER = "activation-memory"
CONTEXTS = (512, 1024, 2048)  # tokens, at which attention was measured
MEASURED_BLOCK = "step/checkpoint-of-every-block"


def activation_factor(claim: Claim, results: Results) -> Finding:
    """Reproduced if a 16-bit tensor and all that a model keeps shrink by the claimed factor, and the loss is equivalent
    within ±0.003 nats by two one-sided tests (TOST). A part holds if one of the three is so. Undecided if both shrink
    as claimed, the tests do not show equivalence, and the interval contains an end of the margin."""
    tensor, wide = results(CHAPTER, "ratio/tensor/bf16-scales"), results(CHAPTER, "ratio/tensor/fp32-scales")
    whole, same = results(CHAPTER, "ratio/4-bits"), bool(results(CHAPTER, "loss/4-bits/equivalent"))
    gap = results.entry(CHAPTER, "loss/4-bits/gap")
    low, high = claim.bounds()
    checks = (
        compare("times smaller, a 16-bit tensor with fp32 scales", wide, low, high),
        compare("times smaller, all that a model keeps", whole, low, high),
        Check(f"loss gap {gap['value']:+.4f} nats, equivalent within ±0.003", same),
    )
    text = (
        f"Four bits store a 16-bit activation in {wide:.1f} to {tensor:.1f} times fewer bytes, and all that a small "
        f"model keeps in {whole:.1f} times fewer (counted). The measured loss differs by {gap['value']:+.4f} nats "
        f"[{gap['low']:+.4f}, {gap['high']:+.4f}]; peak GPU memory was not measured."
    )
    change = "Peak memory and loss of a large model, measured on a GPU."
    open_end = any(gap["low"] < end < gap["high"] for end in (-0.003, 0.003))
    if not same and open_end and checks[0].holds and checks[1].holds:
        return Finding(UNDECIDED, text, change, "medium", checks=checks)
    return found(claim, checks, text, change, "medium")


def linear_factor(claim: Claim, results: Results) -> Finding:
    """Reproduced if the input that a linear layer of this book keeps shrinks by the claimed factor against bf16, the
    width that it has in mixed precision."""
    half, full = results(CHAPTER, "compiled/per-tensor-bf16"), results(CHAPTER, "compiled/per-tensor")
    text = (
        f"Our linear layer keeps its input in {half:.2f} times fewer bytes than bf16 and {full:.2f} times fewer than "
        "fp32 (counted, also when compiled). The rest of a model is not compressed; the report's layer is not public."
    )
    checks = (compare("times fewer bytes than bf16", half, *claim.bounds()),)
    return found(claim, checks, text, "The source of the report's TurboQuantLinear.", "medium")


def activation_share(claim: Claim, results: Results) -> Finding:
    """Reproduced if activations take a share in the claimed range in the four models of Korthikanti et al., both
    without recomputation and with selective recomputation. A part holds if one of the four ends does."""
    low, high = (value / 100 for value in claim.bounds())
    kinds = {"none": "without recomputation", "selective": "with selective recomputation"}
    ends = {
        kind: [results(CHAPTER, f"share-of-memory/{kind}/{end}") for end in ("lowest", "highest")] for kind in kinds
    }
    checks = [
        compare(f"{end} share {kinds[kind]}", value, low, high)
        for kind, pair in ends.items() for end, value in zip(("lowest", "highest"), pair, strict=True)
    ]  # fmt: skip
    text = (
        f"Activations are computed to take {ends['none'][0]:.0%} to {ends['none'][1]:.0%} of GPU memory without "
        f"recomputation and {ends['selective'][0]:.0%} to {ends['selective'][1]:.0%} with selective recomputation. "
        "The formula and the four models are those of Korthikanti et al.; the whitepaper names no model."
    )
    change = "The model, batch size and recomputation that the whitepaper means."
    return found(claim, checks, text, change, "medium", basis=COMPUTED)


def checkpoint_saving(claim: Claim, results: Results) -> Finding:
    """Reproduced if checkpointing every block saves a share in the claimed range. A part holds if it saves more: the
    claim is then too modest."""
    low, high = (value / 100 for value in claim.bounds())
    saved = results(CHAPTER, "checkpoint/blocks-reduction")
    checks = (compare("share saved", saved, low, high), in_part(compare("share saved, low end or more", saved, low)))
    text = (
        f"Checkpointing every block removes {saved:.0%} of the bytes that blocks keep after the forward pass "
        f"(counted){', more than claimed' if saved > high else ''}. Checkpoints of selected activations alone, of "
        "which the text also speaks, save less."
    )
    return found(claim, checks, text, "A count for checkpoints of selected activations alone.", "high")


def checkpoint_time(claim: Claim, results: Results) -> Finding:
    """Reproduced if the time that checkpointing every block adds to a step lies in the claimed range with both of its
    quartiles. A part holds if its median does."""
    low, high = (value / 100 for value in claim.bounds())
    entry = results.entry(CHAPTER, MEASURED_BLOCK)
    added, ends = entry["value"] - 1, [entry.get(end, entry["value"]) - 1 for end in ("low", "high")]
    checks = (
        Check(f"time added, quartiles {ends[0]:.1%} to {ends[1]:.1%} (required: within {low:.1%} to {high:.1%})",
              low <= ends[0] and ends[1] <= high),
        in_part(compare("share of time added, median", added, low, high)),
    )  # fmt: skip
    text = (
        f"Checkpointing every block adds {added:.0%} to a measured CPU step of 25 million parameters (quartiles "
        f"{ends[0]:.1%} to {ends[1]:.1%}). Arithmetic predicts 33%, or 22% because PyTorch stops before a block's last "
        "product."
    )
    return found(claim, checks, text, "The same step, timed on a GPU.", "low", "(1 + 1 + 2) / (1 + 2) - 1")


def compute_for_memory(claim: Claim, results: Results) -> Finding:
    """Reproduced if the peak of 24 and of 96 checkpointed blocks falls at least 9 times for at most 33% more time. A
    part holds if the bytes kept after the forward pass fall at least 9 times."""
    factor, added = results(CHAPTER, "checkpoint/blocks-factor"), results(CHAPTER, MEASURED_BLOCK) - 1
    peaks = {depth: factor * depth / (factor + depth) for depth in (24, 96)}  # one block is whole while it runs again
    enough = min(peaks.values()) >= 9.0 and added <= 0.33
    checks = (
        Check(f"peak at least {min(peaks.values()):.1f} times lower for {added:.0%} more time (required: 9 for 33%)",
              enough),
        in_part(compare("times fewer bytes after the forward pass", factor, 9.0)),
    )  # fmt: skip
    text = (
        f"Checkpointing every block keeps {factor:.0f} times fewer bytes after the forward pass (counted) and takes "
        f"{added:.0%} more time on a CPU (measured). The peak is computed to fall {peaks[24]:.1f} times with 24 blocks "
        f"and {peaks[96]:.1f} times with 96."
    )
    return found(claim, checks, text, "Peak memory of such a step, measured on a GPU.", "medium")


def square_root(claim: Claim, results: Results) -> Finding:
    """Reproduced if the peak grows fourfold, within a quarter, when the depth grows sixteenfold, both with a distance
    between checkpoints that is chosen for the depth and with a checkpoint of every block, from 24 blocks to 384. A part
    holds if it does with one of them, because the document does not say where checkpoints are."""
    grown, factor = (results(CHAPTER, f"checkpoint/{key}") for key in ("peak-at-16-times-the-depth", "blocks-factor"))
    every = (384 / factor + 1) / (24 / factor + 1)  # inputs of all blocks, and one block while it runs again
    text = (
        f"At sixteen times the depth the peak is computed to grow {grown:.2f} times if the distance between "
        f"checkpoints is chosen for the depth, and {every:.1f} times with a checkpoint of every block."
    )
    checks = (
        compare("times the peak at sixteen times the depth, best distance", grown, 3, 5),
        compare("times the peak, a checkpoint of every block", every, 3, 5),
    )
    change = "A statement that the distance between checkpoints grows with the depth."
    return found(claim, checks, text, change, "high", "sqrt(16) = 4", basis=COMPUTED)


def _operations(tokens: int) -> float:
    """Of attention scores and what they weigh, in a layer over so many tokens."""
    return tokens * Transformer.preset("llama2-7b", seq=tokens).score_flops


def _kept(results: Results) -> tuple[float, float, str]:
    """Times as many bytes that attention keeps for twice the tokens, plain and fused, and both in words."""
    plain, fused = (results(CHAPTER, f"attention/doubling/{kernel}") for kernel in ("math", "fused"))
    text = (
        f"From 1,024 to 2,048 tokens the bytes that attention keeps grow {plain:.2f} times in the plain kernel and "
        f"{fused:.2f} times in a fused one (counted)."
    )
    return plain, fused, text


def quadratic(claim: Claim, results: Results) -> Finding:
    """Reproduced if twice the context makes the plain kernel keep four times as many bytes and attention take four
    times as many operations, both within a tenth. A part holds if one of the two does."""
    plain, _, text = _kept(results)
    computed = _operations(2048) / _operations(1024)
    checks = (
        compare("times as many bytes, plain kernel", plain, 3.6, 4.4),
        compare("times as many operations", computed, 3.6, 4.4),
    )
    text += f" Operations are computed to grow {computed:.0f} times in both; no time was measured."
    return found(claim, checks, text, "A plain kernel that does not store its attention scores.", "high")


def quadruples(claim: Claim, results: Results) -> Finding:
    """Reproduced if twice the context makes attention keep four times as many bytes, within a tenth, in a plain kernel
    and in a fused one, because the claim is about attention in general. A part holds if one of the two does."""
    plain, fused, text = _kept(results)
    checks = (
        compare("times as many bytes, plain kernel", plain, 3.6, 4.4),
        compare("times as many bytes, fused kernel", fused, 3.6, 4.4),
    )
    change = "A fused kernel whose memory also grows with the square of the context."
    return found(claim, checks, text, change, "high")


def fused_saving(claim: Claim, results: Results) -> Finding:
    """Reproduced if a fused kernel saves a factor in the claimed range at all three context lengths that were counted,
    because the document names none. A part holds if it does at one."""
    factors = {tokens: results(CHAPTER, f"attention/fused-saves/{tokens}") for tokens in CONTEXTS}
    checks = [compare(f"times fewer bytes at {tokens:,} tokens", f, *claim.bounds()) for tokens, f in factors.items()]
    text = (
        "A fused kernel keeps fewer bytes by a factor of " + ", ".join(f"{f:.1f} at {t:,}" for t, f in factors.items())
        + " tokens (counted, heads of width 32). FlashAttention's authors print 10 at 2K and 20 at 4K; the document "
        "names no length."
    )  # fmt: skip
    return found(claim, checks, text, "A context length that belongs to the figure.", "medium")


WINDOW, CONTEXT = 4096, 32_768  # tokens; the window of Mistral 7B (arXiv:2310.06825)
LENGTHS = (4096, 65_536)


def _window() -> dict[str, Figure]:
    """What a window leaves of what causal attention over the whole context takes and sees."""
    every = CONTEXT * (CONTEXT + 1) / 2
    inside = WINDOW * (WINDOW + 1) / 2 + (CONTEXT - WINDOW) * WINDOW
    share = WINDOW / CONTEXT
    return {"compute": inside / every, "memory": share, "context of the last token in one layer": share}


def _linear() -> dict[str, Figure]:
    """Exponent over the tokens of what each layer computes at 128 features, 256 rows and 16 states per channel."""
    width = 128
    each = {
        "Performer": lambda tokens: 4.0 * tokens * 128 * width, "Linformer": lambda tokens: 4.0 * tokens * 256 * width,
        "Mamba": lambda tokens: 6.0 * tokens * 16 * width,
    }  # fmt: skip
    return {name: _exponent(cost(LENGTHS[0]), cost(LENGTHS[1])) for name, cost in each.items()}


def _exponent(short: float, long: float) -> float:
    return math.log(long / short) / math.log(LENGTHS[1] / LENGTHS[0])


RULES: dict[str, Rule] = {
    "S0-002": activation_factor,
    "S0-014": activation_share,
    "S1-010": checkpoint_saving,
    "S1-011": checkpoint_time,
    "S3-047": fused_saving,
    "S3-049": compute_for_memory,
    "S3-050": Formula(
        "4 + 4 + 8 bytes per parameter in fp32, over 2 + 2 + 4 (master copy) + 8 in mixed precision",
        lambda: {"activations": 32 / 16, "weights, gradients and optimizer": (4 + 4 + 8) / (2 + 2 + 4 + 8)},
        "Mixed precision is computed to halve activations, but weights, gradients and optimizer state with an fp32 "
        "master copy take as many bytes as in fp32. The document does not say which memory it means.",
        "Mixed-precision training without a master copy of the weights.", "x", claimed=2.0, within=0.1,
    ),
    "S3-053": quadruples,
    "S4-055": Formula(
        "2 (bf16 weight) + 2 (bf16 gradient) + 4 + 4 (fp32 moments)", lambda: {"the sum": 2.0 + 2 + 4 + 4},
        "Weights and gradients in bf16 and two fp32 moments add up to {0:.0f} bytes per parameter. An fp32 master copy "
        "is not among them.",
        "Another width of gradients or moments in the list.", "bytes per parameter", claimed=2.0 + 2 + 8, within=0.0,
    ),
    "S4-056": RangeFormula(
        "2 + 2 + 8 bytes per parameter, and 4 more for an fp32 master copy",
        lambda: {"the document's own list": 12.0, "with an fp32 master copy": 16.0},
        "The document's own list adds up to {0:.0f} bytes per parameter. An fp32 master copy, which it does not list, "
        "makes {1:.0f}; fp32 gradients too make 20.",
        "An fp32 master copy in the document's list.", "bytes per parameter", within=0.1,
    ),
    "S4-057": Formula(
        "70e9 * bytes per parameter",
        lambda: {"in full precision, 16 bytes": 70e9 * 16 / 1e12, "by the document's list, 12 bytes": 70e9 * 12 / 1e12},
        "A 70B model is computed to take {0:.2f} TB at full precision (16 bytes per parameter), 20% below the claim. "
        "The document's own bf16 list makes {1:.2f} TB; 1.4 TB need 20 bytes.",
        "A list that adds up to 20 bytes per parameter.", "TB",
    ),
    "S4-058": Formula(
        "(1 + 1 + 2) / (1 + 2) - 1", lambda: {"the forward pass once more": 100 / 3},
        "One more forward pass is computed to add {0:.0f}% compute. PyTorch stops it before a block's last product, "
        "which makes {1:.0f}%; the added time is judged separately.",
        "A backward pass that does not cost twice a forward pass.", "%",
        conditions=lambda: {"as PyTorch runs it": 200 / 9},
    ),
    "S4-059": square_root,
    "S4-063": quadratic,
    "S4-144": RangeFormula(
        "a window of 4,096 tokens over all 32,768 before; a reduction is at most half", _window,
        "A window of 4,096 tokens in a context of 32,768 is computed to leave {0:.0%} of the attention scores and "
        "{1:.1%} of the cached keys and values. A token then sees {2:.1%} of its context directly.",
        "A window that is as long as its context.", "of full attention", claimed=(0.0, 0.5), within=0.0,
    ),
    "S4-145": Formula(
        "log of operations over log of tokens from 4,096 to 65,536, by the operations that each defines", _linear,
        "At a fixed number of features, rows or states the operations of Performer, Linformer and Mamba are computed "
        "to grow with the power {0:.0f} of the tokens, those of attention with {3:.0f}. No layer was timed.",
        "Features or rows that must grow with the sequence.", claimed=1.0, within=0.01,
        conditions=lambda: {"attention": _exponent(4.0 * LENGTHS[0] ** 2, 4.0 * LENGTHS[1] ** 2)},
    ),
    "T-016": linear_factor,
}  # fmt: skip

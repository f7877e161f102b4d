"""Rules over what a GPU was measured to do."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

CHAPTER = "on-a-gpu"
SIZES = (8, 16, 32)  # MiB that are read again and again, within a second level of 50 MB
CLAIMED_MB = 50.0  # by the sentence of S3-042


def second_level(claim: Claim, results: Results) -> Finding:
    """Reproduced if buffers within the second level are read at the claimed rate on a card with an H100's die, and the
    level is as large as claimed. A part holds if one of the two does."""
    rate = max(results.on_gpu(CHAPTER, f"read/{size}-mib") for size in SIZES)
    held_mb = results.on_gpu(CHAPTER, "card/second-level")
    least, most = claim.bounds()
    checks = (
        compare("TB/s at which it is read", rate, least, most),
        compare("MB that it holds", held_mb, 0.9 * CLAIMED_MB, 1.1 * CLAIMED_MB),
    )
    text = (
        f"On a card with an H100's die, buffers of 8 to 32 MiB are measured to be read again at up to {rate:.1f} TB/s, "
        f"{rate / claim.number() - 1:+.0%} from the claim. The driver names {held_mb:.0f} MB."
    )
    return found(claim, checks, text, "A kernel that reads an H100's second level faster.", "medium")


def slower_with_offload(claim: Claim, results: Results) -> Finding:
    """Reproduced if an optimizer update in host memory adds the claimed share to a step on a GPU. A part holds if
    moments streamed from host memory add it."""
    there = results.on_gpu(CHAPTER, "away/update-on-the-host") - 1
    streamed = results.on_gpu(CHAPTER, "away/moments-streamed") - 1
    least, most = (end / 100 for end in claim.bounds())
    checks = (
        compare("share added by an update on the host", there, least, most),
        in_part(compare("share added by streamed moments", streamed, least, most)),
    )
    text = (
        f"At 355M parameters and 8,192 tokens per step an update on the host (torchao) is measured to add {there:.0%}, "
        f"streamed moments {streamed:.0%}. Both shares fall as the tokens per step rise."
    )
    return found(claim, checks, text, "The tokens per step behind ZeRO-Offload's figure.", "medium")


def layer_in_three_memories(claim: Claim, results: Results) -> Finding:
    """Reproduced if a layer of which a third each lies on the card, in host memory and in a file gives the bits of one
    that lies on the card."""
    same, over = results.on_gpu(CHAPTER, "split/same"), results.on_gpu(CHAPTER, "split/over")
    checks = (Check("the results have the same bits", bool(same)),)
    text = (
        f"A layer of 67 million weights, a third on the card, in host memory and in a file each, gives "
        f"{'the same' if same else 'other'} bits in {over:.0f} times the time (measured). The system read the file."
    )
    return found(claim, checks, text, "The same by direct storage access.", "high")


def kernel_over_python(claim: Claim, results: Results) -> Finding:
    """Reproduced if this book's kernels encode and decode at least the claimed number of times as fast as plain PyTorch
    on the same GPU. A part holds if they do one of the two."""
    times = {verb: results.on_gpu(CHAPTER, f"over/{verb}/pytorch-reference") for verb in ("encode", "decode")}
    checks = [compare(f"times as fast as PyTorch to {verb}", f, claim.bounds()[0]) for verb, f in times.items()]
    text = (
        f"Our kernels are measured to encode {times['encode']:.0f} and decode {times['decode']:.0f} times as fast as "
        "our reference in PyTorch on the same GPU, which is cut in chunks for a CPU's cache. The report's two programs "
        "are not published."
    )
    change = "The source of the two implementations that the report timed, or a reference in whole tensors."
    return found(claim, checks, text, change, "low")


RULES: dict[str, Rule] = {
    "S1-007": slower_with_offload,
    "S1-037": layer_in_three_memories,
    "S3-042": second_level,
    "T-013": kernel_over_python,
}

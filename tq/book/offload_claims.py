"""Rules over the chapter on offloading, and on what its document says of single devices; see ``tq.book.claims``."""

from __future__ import annotations

from tq.book import ledger
from tq.book.ledger import NOT_CHECKABLE, NOT_REPRODUCED, REPRODUCED, Claim, Facts, Finding, Rule, graded

OFFLOAD = "offload-and-single-gpu"
READ = "the document's other claims, data/claims.csv"


def slower_with_offload(claim: Claim, facts: Facts) -> Finding:
    """An update in the host's memory slows this step by as much as they say; in part if a streamed one does."""
    low, high = (end / 100 for end in claim.ends())
    there = facts.on_gpu(OFFLOAD, "step/torchao/fp32") - 1
    streamed = facts.on_gpu(OFFLOAD, "step/host/fp32") - 1
    verdict = graded(low <= there <= high, low <= streamed <= high)
    text = f"at 355M and 8,192 tokens a step the update on the host (torchao) adds {there:.0%} and moments streamed "
    text += f"from its memory {streamed:.0%}; it falls as the tokens of a step rise"
    return Finding(verdict, text, "The tokens of the step that was meant.", "medium")


def not_quantization(claim: Claim, facts: Facts) -> Finding:
    """Contradicted where the same document's own claims rest on quantized states."""
    own = [c.id for c in ledger.claims() if c.seed == claim.seed and "8-bit optimizer" in c.claim.lower()]
    if not own:
        return Finding(REPRODUCED, "the document names no quantized method", "One that it names.", "medium", READ)
    text = f"the same document counts 8-bit optimizers, which quantize, among its methods ({', '.join(own)})"
    return Finding(NOT_REPRODUCED, text, "A statement which of the methods the breakthrough is.", "medium", READ)


def scaling_on_one_device(claim: Claim, facts: Facts) -> Finding:
    """Scaling efficiency compares several devices with one."""
    text = "scaling efficiency is the speed of several devices over that of one; for a single device it is not defined"
    return Finding(NOT_CHECKABLE, text, "What was divided by what.")


RULES: dict[str, Rule] = {
    "S1-007": slower_with_offload,
    "S1-002": not_quantization,
    "S1-004": scaling_on_one_device,
}

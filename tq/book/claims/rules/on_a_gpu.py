"""Rules over what a GPU was measured to do."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare

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
        f"On a card with an H100's die, buffers of 8 to 32 MiB are measured to be read again at up to {rate:.1f} TB/s. "
        f"The driver names {held_mb:.0f} MB."
    )
    return found(claim, checks, text, "A kernel that reads an H100's second level faster.", "medium")


RULES: dict[str, Rule] = {"S3-042": second_level}

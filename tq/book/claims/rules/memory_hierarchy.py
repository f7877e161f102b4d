"""Rules over the edge of fast memory, over transfers that hide, and over what attention keeps."""

from __future__ import annotations

from tq.book.claims.ledger import COMPUTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part, shown

CHAPTER = "memory-hierarchy"
BLOCKS = {"4kib": "4 KiB", "64kib": "64 KiB", "4mib": "4 MiB"}
FULL_SPEED = 1.25  # times a hit, below which a set counts as read at full speed: repeats of a hit differ by a tenth
HIDDEN = 1.15  # times a step in memory, up to which transfers count as hidden
WORTH = 1.2  # times as fast, from which on a strategy counts as one that works; set before the run that decides
AS_GOOD = 1.05  # times the misses of another policy, up to which the two count as equal
LENGTHS = (1024, 2048, 4096, 8192, 16_384)


def hundredfold(claim: Claim, results: Results) -> Finding:
    """Reproduced if for some block size a set of 0.9 of the capacity is read at full speed (at most 1.25 times a hit)
    and one of 1.1 of it takes the claimed number of times as long, or more. A part holds if one takes ten times."""
    least = claim.bounds()[0]
    within, past = (
        [results(CHAPTER, f"cliff/{name}/cyclic/lru/{ratio}") for name in BLOCKS] for ratio in ("0.9", "1.1")
    )
    checks = [
        Check(
            f"blocks of {label}: {shown(beyond)} times a hit past the edge, {shown(inside)} before it "
            f"(required: at least {shown(least)} and at most {FULL_SPEED})",
            beyond >= least and inside <= FULL_SPEED,
        )
        for label, inside, beyond in zip(BLOCKS.values(), within, past, strict=True)
    ]
    checks.append(in_part(compare("times a hit, at most", max(past), 10.0)))
    each = [f"{slow:.0f} ({label})" for label, slow in zip(BLOCKS.values(), past, strict=True)]
    before = [f"{inside:.2f}" for inside in within]
    text = (
        f"A scan of 1.1 times the capacity under LRU is measured to take {', '.join(each)} times a hit, by block size; "
        f"one of 0.9 takes {', '.join(before)} (full speed: at most {FULL_SPEED})."
    )
    return found(claim, checks, text, "A fast and a slow memory, a block size and an order of reading.", "medium")


def recomputation_hides(claim: Claim, results: Results) -> Finding:
    """Reproduced if a step that computes blocks again while it reads layers from a drive takes at most 1.15 times the
    same step in memory, at 128 and at 512 tokens. A part holds if it does at 512."""
    short, long = (results(CHAPTER, f"stream/{tokens}/24/fp32/over-memory") for tokens in (128, 512))
    checks = (
        compare("times a step in memory, 128 tokens", short, most=HIDDEN),
        compare("times a step in memory, 512 tokens", long, most=HIDDEN),
        in_part(compare("times a step in memory, 512 tokens", long, most=HIDDEN)),
    )
    text = (
        f"With 24 layers read from a drive while blocks are computed again, a step is measured to take {long:.2f} "
        f"times one in memory at 512 tokens, {short:.2f} times at 128. On a CPU; no serial run was timed."
    )
    return found(claim, checks, text, "A trace of recomputation on a GPU that runs while a fetch does.", "medium")


def longer_contexts(claim: Claim, results: Results) -> Finding:
    """Reproduced if the bytes that 4,096 tokens keep in a layer of Llama 2 7B with plain attention hold the claimed
    number of times as many tokens with fused attention. A part holds if another length from 1,024 to 16,384 does."""
    gains = {tokens: results(CHAPTER, f"context/layer/{tokens}") for tokens in LENGTHS}
    checks = [compare("times as many tokens, from 4,096", gains[4096], *claim.bounds())]
    checks += [
        in_part(compare(f"times as many tokens, from {tokens:,}", gain, *claim.bounds()))
        for tokens, gain in gains.items() if tokens != 4096
    ]  # fmt: skip
    text = (
        "In the bytes of plain attention a layer of Llama 2 7B is computed to keep "
        + ", ".join(f"{gains[tokens]:.1f}" for tokens in (2048, 4096, 8192))
        + " times as many tokens with fused attention, from 2,048, 4,096 and 8,192 tokens. No length is named."
    )
    return found(claim, checks, text, "The context length behind the fivefold figure.", "medium", basis=COMPUTED)


def three_strategies(claim: Claim, results: Results) -> Finding:
    """Reproduced if, in blocks of 4 MiB beyond the capacity, each strategy alone makes accesses at least 1.2 times as
    fast: the best eviction, reading ahead, and going back and forth. A part holds if one does."""
    scan, best, turned = (
        results(CHAPTER, f"cliff/4mib/{way}/1.1") for way in ("cyclic/lru", "cyclic/belady", "sawtooth/lru")
    )
    plain, ahead = (results(CHAPTER, f"ahead/{name}") for name in ("plain", "over-memory"))
    gains = {"explicit eviction": scan / best, "reading ahead": plain / ahead, "another order": scan / turned}
    checks = [compare(f"times as fast by {name}", gain, WORTH) for name, gain in gains.items()]
    checks.append(in_part(compare("times as fast by the best of them", max(gains.values()), WORTH)))
    text = (
        "Measured in blocks of 4 MiB at 1.1 times the capacity, eviction with foresight makes accesses "
        f"{gains['explicit eviction']:.1f} times as fast and a changed order {gains['another order']:.1f} times. "
        f"Reading ahead, with changed order, makes a larger pass {gains['reading ahead']:.1f} times as fast."
    )
    return found(claim, checks, text, "A set or an order on which one of them gains nothing.", "medium")


def by_frequency(claim: Claim, results: Results) -> Finding:
    """Reproduced if eviction by frequency of access misses as often, within a twentieth, as Gemini's own policy, which
    by its source code goes by the next use, on the recorded order of a training step with a separate sweep over the
    moments. Without a sweep every policy misses alike, which tells nothing."""
    ratio = results(CHAPTER, "order/sweep/lfu") / results(CHAPTER, "order/sweep/gemini")
    checks = [compare("misses by frequency over those by Gemini's policy", ratio, 1 / AS_GOOD, AS_GOOD)]
    text = (
        "By its source code Gemini moves blocks between GPU and CPU by their next use. On a step's recorded order, "
        f"eviction by frequency is computed to miss {ratio:.2f} times as often with an optimizer sweep, without one as "
        "often."
    )
    change, code = "A version of Gemini that counts accesses.", "ColossalAI, zero/gemini/placement_policy.py"
    return found(claim, checks, text, change, "medium", code, basis=COMPUTED)


RULES: dict[str, Rule] = {
    "S1-036": recomputation_hides, "S1-038": by_frequency, "S3-036": hundredfold, "S3-048": longer_contexts,
    "S3-075": three_strategies,
}  # fmt: skip

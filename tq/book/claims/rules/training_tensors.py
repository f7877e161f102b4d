"""Rules over what gradients, momenta and activations of real runs look like, and lose."""

from __future__ import annotations

from tq.book.claims.formulas import STORED, STORED_BF16
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.quant import bounds

CHAPTER, ROTATION = "training-tensors", "rotation-and-codebook"
FAR = 0.05  # Kolmogorov-Smirnov distance from which on a sample is not Gaussian here


def four_bit_momentum(claim: Claim, results: Results) -> Finding:
    """Reproduced if a momentum of a real run loses at most 10% more of its energy in 4 bits than a Gaussian does. A
    part holds if it loses at most twice as much."""
    lost, gaussian = results(CHAPTER, "nmse/momentum/plain"), bounds.unbiased_nmse(4)
    checks = (
        compare("energy lost over that of a Gaussian", lost / gaussian, most=1.1),
        in_part(compare("the same", lost / gaussian, most=2.0)),
    )
    text = (
        f"Momenta of a real run lose {lost:.2%} of their energy in 4 bits (measured); a Gaussian is predicted to lose "
        f"{gaussian:.2%}. Scales make it {STORED_BF16:.4g} to {STORED:.4g} bits per element; the effect on the loss is "
        "judged separately."
    )
    change = "Momenta of a larger model that lose more energy than a Gaussian does."
    return found(claim, checks, text, change, "medium", "D / (1 - D) for the 4-bit Lloyd-Max quantizer")


def gaussian_after_rotation(claim: Claim, results: Results) -> Finding:
    """Reproduced if three statements hold. Gradients, momenta and activations have a Kolmogorov-Smirnov (KS) distance
    below 0.05 from a Gaussian after rotation, and a smaller one than before. A block with a single spike is that near
    too. A Gaussian and a Beta codebook differ by 1% or more in error. A part holds if one of these comparisons does."""
    kinds = {"gradient": "gradients", "momentum": "momenta", "activation": "activations"}
    after = {k: results(CHAPTER, f"shape/{k}/ks-after") for k in kinds}
    before = {k: results(CHAPTER, f"shape/{k}/ks-before") for k in kinds}
    spike, penalty = results(ROTATION, "ks/spike/1-round"), results(ROTATION, "mismatch-penalty")
    checks = [
        Check(f"KS distance of {kinds[k]} {before[k]:.3f}, {after[k]:.3f} after rotation (required: below {FAR})",
              after[k] < FAR and after[k] < before[k]) for k in kinds
    ]  # fmt: skip
    checks += [
        compare("KS distance of a block with one spike", spike, most=FAR),
        compare("error of a Gaussian codebook above that of a Beta codebook", penalty, 0.01),
    ]
    text = (
        f"After one rotation gradients, momenta and activations have a mean KS distance of {min(after.values()):.3f} "
        f"to {max(after.values()):.3f} from a Gaussian (measured). A block with one spike keeps {spike:.3f}; Gaussian "
        f"and Beta codebooks differ by only {penalty:.2%} in error."
    )
    change = "A kind of tensor that stays farther away, or blocks so short that the Beta codebook differs."
    return found(claim, checks, text, change, "medium", "KS distance < 0.05")


def error_against_uniform(claim: Claim, results: Results) -> Finding:
    """Reproduced if on heavy-tailed tensors the error falls by the claimed share or more, both against a uniform grid
    with one scale per tensor and against one with a scale per block. The report does not say which it means; a part
    holds if one does."""
    least = claim.bounds()[0] / 100
    entries = {each: results.entry(CHAPTER, f"reduction-against-uniform/per-{each}") for each in ("tensor", "block")}
    checks = [
        compare(f"share by which the error falls, one scale per {each}", entry["value"], least)
        for each, entry in entries.items()
    ]
    count = min(entry["n"] for entry in entries.values())
    tensor, block = (entries[each]["value"] for each in ("tensor", "block"))
    text = (
        f"Against a uniform grid the measured error falls by {tensor:.0%} with one scale per tensor and by "
        f"{block:.0%} with one per block. These are medians over {count} heavy-tailed tensors of one run."
    )
    change = "The uniform grid that the report compared with."
    return found(claim, checks, text, change, "medium" if count >= 20 else "low")


RULES: dict[str, Rule] = {"S0-012": four_bit_momentum, "T-001": gaussian_after_rotation, "T-002": error_against_uniform}

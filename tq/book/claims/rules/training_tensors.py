"""Rules over what gradients, momenta and activations of real runs look like, and lose."""

from __future__ import annotations

from tq.book.claims.formulas import STORED, STORED_BF16
from tq.book.claims.ledger import NOT_REPRODUCED, PARTLY, REPRODUCED, Claim, Finding, Results, Rule
from tq.quant import bounds
from tq.quant.codec import Codec

CHAPTER, ROTATION = "training-tensors", "rotation-and-codebook"


def four_bit_momentum(claim: Claim, results: Results) -> Finding:
    """Four bits carry a momentum if a real one loses no more than a Gaussian does; a tenth is left for noise."""
    lost, gaussian = results(CHAPTER, "nmse/momentum/plain"), bounds.unbiased_nmse(4)
    ratio = lost / gaussian
    verdict = REPRODUCED if ratio <= 1.1 else PARTLY if ratio <= 2 else NOT_REPRODUCED
    smallest, largest = STORED_BF16, Codec(bits=4, block=64).bits_per_element
    return Finding(
        verdict,
        f"momenta of a real run lose {lost:.2%} of their energy in the code, Gaussian samples {gaussian:.2%}. "
        f"With scales it is {smallest:.4g} to {largest:.4g} bits a number, {STORED:.4g} by default. "
        "What that does to a loss is another claim",
        "Momenta of a larger or longer trained model that lose more than a Gaussian block does.",
        "medium",
        "D / (1 - D) for the 4-bit Lloyd-Max quantizer",
    )


def gaussian_after_rotation(claim: Claim, results: Results) -> Finding:
    """Two statements: real tensors become Gaussian (KS distance below .05, and below what it was), for every block; and
    the sphere's Beta law does not serve (its codebook and the Gaussian one differ by more than a per cent)."""
    kinds = {"gradient": "gradients", "momentum": "momenta", "activation": "activations"}
    before, after = ({k: results(CHAPTER, f"shape/{k}/ks-{when}") for k in kinds} for when in ("before", "after"))
    good = [kind for kind in kinds if after[kind] < 0.05 and after[kind] < before[kind]]
    spike, penalty = results(ROTATION, "ks/spike/1-round"), results(ROTATION, "mismatch-penalty")
    every_block, beta_fails = spike < 0.05, penalty > 0.01
    text = "mean distance to a Gaussian, before and after one round: "
    text += ", ".join(f"{name} {before[kind]:.3f} to {after[kind]:.3f}" for kind, name in kinds.items())
    if good:
        text = f"holds in the mean for {', '.join(kinds[kind] for kind in good)} ({text})"
    text += "" if every_block else f"; not for every block: a lone spike keeps {spike:.3f}"
    text += f"; as to the Beta law, at 128 elements exchanging its codebook for the Gaussian one costs {penalty:.2%}"
    whole = len(good) == len(kinds) and every_block and beta_fails
    verdict = REPRODUCED if whole else PARTLY if good else NOT_REPRODUCED
    change = "A kind of tensor that stays farther than 0.05 away, or blocks so short that the Beta law differs."
    return Finding(verdict, text, change, "medium", "KS distance < 0.05")


def error_against_uniform(claim: Claim, results: Results) -> Finding:
    """The reduction on heavy-tailed tensors, against a uniform grid with one scale a tensor and with one a block. It
    agrees where it reaches the claimed share or misses it by five points at most."""
    claimed = claim.number() / 100
    entries = {each: results.entry(CHAPTER, f"reduction-against-uniform/per-{each}") for each in ("tensor", "block")}
    shown = {each: f"with one scale a {each} ({entry['value']:.0%})" for each, entry in entries.items()}
    yes = [shown[each] for each, entry in entries.items() if entry["value"] >= claimed - 0.05]
    no = [shown[each] for each in entries if shown[each] not in yes]
    count = min(entry["n"] for entry in entries.values())
    verdict = PARTLY if yes and no else REPRODUCED if yes else NOT_REPRODUCED
    text = f"holds against a uniform grid {' and '.join(yes)}" if yes else "the reduction is smaller"
    text += ("; not " if yes else " ") + " or ".join(no) if no else ""
    text += f". Median over {count} heavy-tailed tensor{'s' if count != 1 else ''}"
    confidence = "medium" if count >= 20 else "low"
    return Finding(verdict, text, "Heavy-tailed tensors of another model, or another uniform grid.", confidence)


RULES: dict[str, Rule] = {"S0-012": four_bit_momentum, "T-001": gaussian_after_rotation, "T-002": error_against_uniform}

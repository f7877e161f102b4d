"""Rules over what gradients, momenta and activations of real runs look like, and lose."""

from __future__ import annotations

from tq.book.claims.formulas import STORED, STORED_BF16
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.quant import bounds

CHAPTER, ROTATION = "training-tensors", "rotation-and-codebook"
FAR = 0.05  # Kolmogorov-Smirnov distance from which on a sample is not Gaussian here


def four_bit_momentum(claim: Claim, results: Results) -> Finding:
    """Four bits carry a momentum if a real one loses at most a tenth more than a Gaussian does; in part twice as
    much."""
    lost, gaussian = results(CHAPTER, "nmse/momentum/plain"), bounds.unbiased_nmse(4)
    checks = (
        compare("loss over that of a Gaussian", lost / gaussian, most=1.1),
        in_part(compare("the same", lost / gaussian, most=2.0)),
    )
    text = (
        f"Momenta of a real run lose {lost:.2%} of their energy in four bits, as Gaussian samples do ({gaussian:.2%}). "
        f"Scales make it {STORED_BF16:.4g} to {STORED:.4g} bits a number. What that does to a loss is another claim."
    )
    change = "Momenta of a larger model that lose more than a Gaussian block does."
    return found(claim, checks, text, change, "medium", "D / (1 - D) for the 4-bit Lloyd-Max quantizer")


def gaussian_after_rotation(claim: Claim, results: Results) -> Finding:
    """Real tensors are nearer to a Gaussian than .05 after a rotation, and nearer than before; so is every block, and
    the sphere's Beta law does not serve: its codebook costs a per cent or more."""
    kinds = {"gradient": "gradients", "momentum": "momenta", "activation": "activations"}
    after = {k: results(CHAPTER, f"shape/{k}/ks-after") for k in kinds}
    before = {k: results(CHAPTER, f"shape/{k}/ks-before") for k in kinds}
    spike, penalty = results(ROTATION, "ks/spike/1-round"), results(ROTATION, "mismatch-penalty")
    checks = [
        Check(f"distance of {kinds[k]} {before[k]:.3f} to {after[k]:.3f}, needed below {FAR}",
              after[k] < FAR and after[k] < before[k]) for k in kinds
    ]  # fmt: skip
    checks += [compare("distance of a lone spike", spike, most=FAR), compare("cost of Beta's codebook", penalty, 0.01)]
    text = (
        f"In the mean gradients, momenta and activations lie {min(after.values()):.3f} to {max(after.values()):.3f} "
        "from a "
        f"Gaussian after one round. Not every block does, a lone spike keeps {spike:.3f}, and the Beta codebook costs "
        f"only {penalty:.2%}."
    )
    change = "A kind of tensor that stays farther away, or blocks so short that the Beta law differs."
    return found(claim, checks, text, change, "medium", "KS distance < 0.05")


def error_against_uniform(claim: Claim, results: Results) -> Finding:
    """On heavy-tailed tensors the error falls by the claimed share or more against a uniform grid with one scale a
    tensor, and with one a block: the report does not say which."""
    least = claim.bounds()[0] / 100
    entries = {each: results.entry(CHAPTER, f"reduction-against-uniform/per-{each}") for each in ("tensor", "block")}
    checks = [compare(f"reduction, one scale a {each}", entry["value"], least) for each, entry in entries.items()]
    count = min(entry["n"] for entry in entries.values())
    tensor, block = (entries[each]["value"] for each in ("tensor", "block"))
    text = (
        f"Against a uniform grid with one scale a tensor the error falls by {tensor:.0%}, with one a block by "
        f"{block:.0%}: "
        f"medians over {count} heavy-tailed tensors of a run."
    )
    change = "The uniform grid that the report compared with."
    return found(claim, checks, text, change, "medium" if count >= 20 else "low")


RULES: dict[str, Rule] = {"S0-012": four_bit_momentum, "T-001": gaussian_after_rotation, "T-002": error_against_uniform}

"""Rules over larger batches, tensor parallelism and the number of GPUs."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part

CHAPTER = "impact-memory"
KEEPING = ("none", "none-fused", "selective")  # settings that keep activations; "full" keeps the layers' inputs
SIZES = ("7b", "13b", "70b")  # that the whitepaper names
LIKELY, UNLIKELY = 0.8, 0.2


def batch_factor(claim: Claim, results: Results) -> Finding:
    """The batch of each named model grows by the low end or more where activations are kept and where every layer is
    recomputed; in part in one of the two."""
    least = claim.bounds()[0]
    gains = {s: [results(CHAPTER, f"gain/{size}/{s}") for size in SIZES] for s in (*KEEPING, "full")}
    kept = [g for s in KEEPING for g in gains[s]]
    instead = [results(CHAPTER, f"recompute-gain/{size}") for size in SIZES]
    checks = (
        compare("least gain where activations are kept", min(kept), least),
        compare("least gain where layers are recomputed", min(gains["full"]), least),
    )
    text = (
        f"{min(kept):.1f} to {max(kept):.1f} times the batch where a run keeps its activations, "
        f"{min(gains['full']):.1f} to {max(gains['full']):.1f} where it recomputes every layer. Recomputation alone "
        "gives "
        f"{min(instead):.0f} to {max(instead):.0f} times. Computed, not measured on a GPU."
    )
    change = "Largest batches with and without codes, measured on a GPU."
    return found(claim, checks, text, change, "medium", "m = 1 / (1 - c + c / r), r = 16 / 4.25")


def _batch_row(size: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """From the claimed batch codes lead into the claimed range with selective recomputation, as Megatron-LM trains;
        in part to its low end or beyond. Contexts are those at which the first batch fills 80 GB."""
        grown = {s: results(CHAPTER, f"table/{size}/{s}/batch") for s in ("selective", "full")}
        context = {s: results(CHAPTER, f"table/{size}/{s}/context") for s in grown}
        low, high = claim.bounds()
        checks = [
            compare("batch with selective recomputation", grown["selective"], low, high),
            in_part(compare("the same, to the low end or beyond", grown["selective"], low)),
        ]
        text = (
            f"To {grown['selective']:.0f} with selective recomputation, which fills 80 GB at "
            f"{context['selective']:.0f} tokens a sequence, and to {grown['full']:.0f} with full recomputation at "
            f"{context['full']:,.0f}. The whitepaper gives neither."
        )
        return found(claim, checks, text, change, "medium")

    return rule


def training_time(claim: Claim, results: Results) -> Finding:
    """The larger batch saves the low end of the time on the network of rented H100."""
    most, free = results(CHAPTER, "time/400g/coded/most"), results(CHAPTER, "time/400g/free/most")
    instead = results(CHAPTER, "time/instead-of-recompute")
    checks = (compare("largest share of the time saved on 400 Gbit/s", most, claim.bounds()[0] / 100),)
    text = (
        f"On the ports of rented H100 a larger batch saves at most {most:.1%} of the time, {free:.1%} with a codec "
        "that "
        f"takes none. Codes in place of full recomputation would save {instead:.0%}. By a model."
    )
    return found(claim, checks, text, "Throughput by batch of a 7B model, measured on a GPU.", "low")


def tensor_parallelism(claim: Claim, results: Results) -> Finding:
    """Of the layouts that hold the first batch with TP8, four in five hold four sequences with TP4 and codes; in part
    one in five or more."""
    reach, keep, nothing = (results(CHAPTER, f"tp/{what}") for what in ("reach", "keep", "nothing"))
    checks = (
        compare("share of the layouts", reach, LIKELY),
        in_part(compare("the same", reach, UNLIKELY)),
    )
    text = (
        f"Of {results(CHAPTER, 'tp/layouts'):.0f} layouts that hold one or two sequences with TP8, {reach:.0%} hold "
        "four "
        f"with TP4 and codes, {nothing:.0%} none at all: activations of a GPU grow eightfold against a ratio of 3.8, "
        "and "
        "states double."
    )
    change = "Pipeline stages, sharding and context of the 70B row."
    return found(claim, checks, text, change, "high", "4 * (8 / 4) / 3.76")


def gpu_count(claim: Claim, results: Results) -> Finding:
    """The smallest cluster that holds 70B halves with codes, with or without recomputation; in part where codes make
    TP4
    fit in more than one layout of five."""
    least = {(n, r): results(CHAPTER, f"least/{n}/{r}") for n in ("plain", "coded") for r in ("none", "full")}
    enabled = results(CHAPTER, "tp/enabled")
    checks = [
        Check(f"{least['plain', r]:.0f} GPUs become {least['coded', r]:.0f}, recomputing {r}",
              least["coded", r] <= 0.55 * least["plain", r]) for r in ("none", "full")
    ] + [in_part(compare("share of the layouts where TP4 fits by codes", enabled, UNLIKELY))]  # fmt: skip
    text = (
        f"The smallest cluster that holds 70B stays at {least['plain', 'none']:.0f} GPUs, or "
        f"{least['plain', 'full']:.0f} with recomputation. In {enabled:.0%} of the layouts TP8 can become TP4. Half "
        "the "
        f"GPUs for twice as long take {results(CHAPTER, 'hours/halved-coded'):.2f} times the GPU-hours."
    )
    change = "A 70B run whose smallest cluster halves with codes."
    return found(claim, checks, text, change, "medium", "cost = GPUs * hours * price")


RULES: dict[str, Rule] = {
    "S0-009": batch_factor,
    "S0-010": gpu_count,
    "S0-045": _batch_row("7b", "Context and recomputation of the 7B row."),
    "S0-046": training_time,
    "S0-047": _batch_row("13b", "Context and recomputation of the 13B row."),
    "S0-048": tensor_parallelism,
}

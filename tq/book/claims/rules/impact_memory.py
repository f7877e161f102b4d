"""Rules over larger batches, tensor parallelism and the number of GPUs."""

from __future__ import annotations

from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for

CHAPTER = "impact-memory"
KEEPING = ("none", "none-fused", "selective")  # settings that keep activations; "full" keeps the layers' inputs


def batch_factor(claim: Claim, results: Results) -> Finding:
    """Every model and setting reaches the low end; in part if the settings that keep activations do."""
    low, _ = claim.ends()
    gains = {s: [results(CHAPTER, f"gain/{size}/{s}") for size in ("7b", "13b", "70b")] for s in (*KEEPING, "full")}
    kept = [g for s in KEEPING for g in gains[s]]
    every = all(g >= low for each in gains.values() for g in each)
    instead = [results(CHAPTER, f"recompute-gain/{size}") for size in ("7b", "13b", "70b")]
    text = (
        f"{'holds ' if min(kept) >= low else ''}against a run that keeps its activations: {min(kept):.1f} to "
        f"{max(kept):.1f} times the batch; against one that recomputes every layer {min(gains['full']):.1f} to "
        f"{max(gains['full']):.1f}. Recomputation alone gives {min(instead):.0f} to {max(instead):.0f}. Needed are "
        f"{results(CHAPTER, 'needed/2'):.0%} of the bytes for two and {results(CHAPTER, 'needed/3'):.0%} for three"
    )
    formula = "m = 1 / (1 - c + c / r), r = 16 / 4.25"
    return Finding(verdict_for(every, min(kept) >= low), text, "Largest batches measured on a GPU.", "medium", formula)


def _batch_row(size: str) -> Rule:
    def judge(claim: Claim, results: Results) -> Finding:
        """Every setting inside the range, or at most 15 % above; in part if some are."""
        low, high = claim.ends()
        found = {s: results(CHAPTER, f"table/{size}/{s}/batch") for s in (*KEEPING, "full")}
        context = {s: results(CHAPTER, f"table/{size}/{s}/context") for s in found}
        yes = [s for s, batch in found.items() if low <= batch <= high * 1.15]
        text = "context and recomputation, which decide it, are not given: from the same start codes lead to "
        text += ", ".join(f"{found[s]:.0f} ({s}, {context[s]:.0f} tokens a sequence)" for s in found)
        text += ". ZeRO-3 over 64 GPUs of 80 GB"
        verdict = verdict_for(len(yes) == len(found), bool(yes))
        return Finding(verdict, text, "A statement of context and sharding; peak memory of a GPU.", "medium")

    return judge


def training_time(claim: Claim, results: Results) -> Finding:
    """The low end saved on every network; in part if on some, or by codes in place of recomputation."""
    low = claim.ends()[0] / 100
    most = {n: results(CHAPTER, f"time/{n}/coded/most") for n in ("400g", "100g", "25g")}
    free, instead = results(CHAPTER, "time/400g/free/most"), results(CHAPTER, "time/instead-of-recompute")
    yes = [n for n, saved in most.items() if saved >= low]
    text = (
        f"by the model a larger batch saves at most {most['400g']:.1%} of the time on ports of 400 Gbit/s "
        f"({free:.1%} if the codec took none), {most['100g']:.1%} at 100 and {most['25g']:.0%} at 25, where ZeRO-3 "
        f"gathers weights over a link too slow for it; codes in place of full recomputation save {instead:.0%}"
    )
    verdict = verdict_for(len(yes) == len(most), bool(yes) or instead >= low)
    return Finding(verdict, text, "Throughput by batch measured on a GPU.", "low")


def tensor_parallelism(claim: Claim, results: Results) -> Finding:
    """Nearly every layout that starts as claimed arrives as claimed; in part if some do."""
    reach, keep, nothing = (results(CHAPTER, f"tp/{what}") for what in ("reach", "keep", "nothing"))
    text = (
        f"of {results(CHAPTER, 'tp/layouts'):.0f} layouts that hold 1 or 2 sequences with TP8, {reach:.0%} hold 4 with "
        f"TP4 and codes, {keep:.0%} at least what they held before, {nothing:.0%} none at all: activations of a GPU "
        "grow by 4 x 2 = 8 against a ratio of 3.8, and its states double"
    )
    change = "A statement of pipeline stages, sharding and context."
    return Finding(verdict_for(reach >= 0.9, reach > 0), text, change, "high", "4 * (8 / 4) / 3.76")


def gpu_count(claim: Claim, results: Results) -> Finding:
    """The least number of GPUs halves; in part if codes make half of the tensor parallelism fit somewhere."""
    least = {(n, r): results(CHAPTER, f"least/{n}/{r}") for n in ("plain", "coded") for r in ("none", "full")}
    halves = all(least["coded", r] <= 0.55 * least["plain", r] for r in ("none", "full"))
    enabled = results(CHAPTER, "tp/enabled")
    text = (
        f"in {enabled:.0%} of the layouts codes make TP4 fit where it did not, so their number may halve; but 70B fits "
        f"{least['plain', 'none']:.0f} GPUs without codes and {least['coded', 'none']:.0f} with them. Count is not "
        f"cost: 128 in place of 256 take {results(CHAPTER, 'hours/halved'):.2f} times the GPU-hours without codes and "
        f"{results(CHAPTER, 'hours/halved-coded'):.2f} with them, {results(CHAPTER, 'hours/coded'):.2f} on all 256"
    )
    change = "A run whose GPU-hours fall with the number of GPUs."
    return Finding(verdict_for(halves, enabled > 0), text, change, "medium", "cost = GPUs * hours * price")


RULES: dict[str, Rule] = {
    "S0-009": batch_factor,
    "S0-010": gpu_count,
    "S0-045": _batch_row("7b"),
    "S0-046": training_time,
    "S0-047": _batch_row("13b"),
    "S0-048": tensor_parallelism,
    "S0-049": gpu_count,
}

"""Rules over larger batches, tensor parallelism and the number of GPUs."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, RangeFormula
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems import Bits, Cluster, Compression, Layout, Transformer, predict

CHAPTER = "impact-memory"
KEEPING = ("none", "none-fused", "selective")  # settings that keep activations; "full" keeps the layers' inputs
SIZES = ("7b", "13b", "70b")  # that the whitepaper names
LIKELY, UNLIKELY = 0.8, 0.2


def batch_factor(claim: Claim, results: Results) -> Finding:
    """Reproduced if the batch of each named model grows by the claimed low end or more, both where activations are kept
    and where every layer is recomputed. A part holds if it does in one of the two."""
    least = claim.bounds()[0]
    gains = {s: [results(CHAPTER, f"gain/{size}/{s}") for size in SIZES] for s in (*KEEPING, "full")}
    kept = [g for s in KEEPING for g in gains[s]]
    instead = [results(CHAPTER, f"recompute-gain/{size}") for size in SIZES]
    checks = (
        compare("smallest gain where activations are kept, times", min(kept), least),
        compare("smallest gain where every layer is recomputed, times", min(gains["full"]), least),
    )
    text = (
        f"4-bit activations are modelled to allow {min(kept):.1f} to {max(kept):.1f} times the batch where activations "
        f"are kept, {min(gains['full']):.1f} to {max(gains['full']):.1f} with full recomputation. Recomputation alone "
        f"gives {min(instead):.0f} to {max(instead):.0f} times; nothing was measured on a GPU."
    )
    change = "Largest batches with and without 4-bit activations, measured on a GPU."
    return found(claim, checks, text, change, "medium", "m = 1 / (1 - c + c / r), r = 16 / 4.25")


def _batch_row(size: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if compression raises the first batch into the claimed range with selective recomputation, as
        Megatron-LM trains. A part holds if it is raised to the low end or beyond. The length of the sequences is the
        one at which the first batch fills 80 GB."""
        grown = {s: results(CHAPTER, f"table/{size}/{s}/batch") for s in ("selective", "full")}
        context = {s: results(CHAPTER, f"table/{size}/{s}/context") for s in grown}
        low, high = claim.bounds()
        checks = [
            compare("batch with selective recomputation", grown["selective"], low, high),
            in_part(compare("the same, low end or beyond", grown["selective"], low)),
        ]
        text = (
            f"4-bit activations are modelled to raise the {size.upper()} batch to {grown['selective']:.0f} with "
            f"selective recomputation, to {grown['full']:.0f} with full. The whitepaper names no sequence length; the "
            f"first batch fills 80 GB at {context['selective']:,.0f} and {context['full']:,.0f} tokens."
        )
        return found(claim, checks, text, change, "medium")

    return rule


def training_time(claim: Claim, results: Results) -> Finding:
    """Reproduced if the larger batch saves the claimed low end of the time at 400 Gbit/s per GPU, the network of rented
    H100."""
    most, free = results(CHAPTER, "time/400g/coded/most"), results(CHAPTER, "time/400g/free/most")
    instead = results(CHAPTER, "time/instead-of-recompute")
    checks = (compare("largest share of the time saved at 400 Gbit/s", most, claim.bounds()[0] / 100),)
    text = (
        f"At 400 Gbit/s per GPU a larger 7B batch is modelled to save at most {most:.1%} of the time ({free:.1%} with "
        f"a free codec). Compression in place of full recomputation would save {instead:.0%}."
    )
    return found(claim, checks, text, "Throughput of a 7B model at several batch sizes, measured on GPUs.", "low")


def tensor_parallelism(claim: Claim, results: Results) -> Finding:
    """Reproduced if 80 % of the layouts that hold the first batch with TP8 hold four sequences with TP4 and
    compression. A part holds from 20 %."""
    reach, keep, nothing = (results(CHAPTER, f"tp/{what}") for what in ("reach", "keep", "nothing"))
    checks = (
        compare("share of the layouts that hold four sequences with TP4", reach, LIKELY),
        in_part(compare("the same", reach, UNLIKELY)),
    )
    text = (
        f"Of {results(CHAPTER, 'tp/layouts'):.0f} modelled layouts that hold one or two sequences with TP8, "
        f"{reach:.0%} hold four with TP4 and 4-bit activations, {nothing:.0%} hold none. Activations per GPU grow "
        "four- to eightfold against a compression of 3.8 times; states double."
    )
    change = "The pipeline stages, sharding and sequence length of the whitepaper's 70B row."
    return found(claim, checks, text, change, "high", "(2 to 4) * (8 / 4) / 3.76")


def gpu_count(claim: Claim, results: Results) -> Finding:
    """Reproduced if the smallest cluster that holds 70B halves with compression, with or without recomputation. A part
    holds if TP4 fits only with compression in 20 % of the layouts or more."""
    least = {(n, r): results(CHAPTER, f"least/{n}/{r}") for n in ("plain", "coded") for r in ("none", "full")}
    enabled = results(CHAPTER, "tp/enabled")
    checks = [
        Check(f"{least['plain', r]:.0f} GPUs become {least['coded', r]:.0f}, {words} recomputation (required: at most "
              "55%)",
              least["coded", r] <= 0.55 * least["plain", r]) for r, words in (("none", "no"), ("full", "full"))
    ] + [in_part(compare("share of the layouts where TP4 fits only with compression", enabled, UNLIKELY))]  # fmt: skip
    text = (
        f"The smallest cluster that holds 70B is modelled at {least['plain', 'none']:.0f} GPUs, and at "
        f"{least['coded', 'none']:.0f} with 4-bit activations ({least['plain', 'full']:.0f} and "
        f"{least['coded', 'full']:.0f} with recomputation). TP4 fits only with compression in {enabled:.0%} of "
        f"layouts; half the GPUs take {results(CHAPTER, 'hours/halved-coded'):.2f} times the GPU-hours."
    )
    change = "A 70B run whose smallest cluster halves with 4-bit activations."
    return found(claim, checks, text, change, "medium", "cost = GPUs * hours * price")


def _utilization() -> dict[str, Figure]:
    """Share of the peak over that at 16 sequences per GPU, kept in bf16."""
    model, cluster = Transformer.preset("llama2-13b", seq=512), Cluster("h100-80gb", 64)

    def rate(batch: int, compression: Compression | None) -> float:
        layout = Layout(dp=64, micro_batch=batch, global_batch=64 * 96, zero=3)
        return float(predict(model, layout, cluster, compression=compression).model_tflops_per_gpu)

    codecs = {"4-bit activations": Compression(activations=Bits(4)), "a codec that takes no time": None}
    return {f"{n}, {name}": rate(n, codec) / rate(16, None) for name, codec in codecs.items() for n in (32, 48)}


RULES: dict[str, Rule] = {
    "S0-009": batch_factor,
    "S0-010": gpu_count,
    "S0-045": _batch_row("7b", "The sequence length and recomputation of the whitepaper's 7B row."),
    "S0-046": training_time,
    "S0-047": _batch_row("13b", "The sequence length and recomputation of the whitepaper's 13B row."),
    "S0-048": tensor_parallelism,
    "S0-074": RangeFormula(
        "FLOP/s of a modelled 13B step on 64 H100, ZeRO-3, 512 tokens per sequence, over that at 16 sequences per GPU",
        lambda: dict(list(_utilization().items())[:2]),
        "Modelled, 13B on 64 H100 uses its GPUs {0:.2f} times as well at 32 sequences with 4-bit activations as at 16 "
        "without, {1:.2f} times at 48. If coding took no time it would be {3:.2f} times.",
        "The utilization of a 13B step by its batch, timed on GPUs.", "x", confidence="low", claimed=(1.01, 1e9),
        within=0.0, conditions=lambda: dict(list(_utilization().items())[2:]),
    ),
}

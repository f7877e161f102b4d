"""Rules over offloading, and over what the documents say of single devices."""

from __future__ import annotations

from tq.book.claims import ledger
from tq.book.claims.formulas import NF4_DQ, STORED, Formula, Free, RangeFormula
from tq.book.claims.ledger import NOT_CHECKABLE, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems import Layout, Transformer, caching, memory, offload
from tq.systems.offload import Place, Plan

CHAPTER = "offload-and-single-gpu"
READ = "the document's other claims, data/claims.csv"
CARD_FLOPS, H100_FLOPS = 80e12, 400e12  # a second: half of a 4090's peak, and what runs on H100 realise
DRIVE = Place("NVMe", 5e9, 5e9, False)
BYTES = "2 (weight) + 2 (gradient) + 4 (master) + 8 (moments) bytes a parameter"
YEAR_S, HOURS_A_YEAR = 3.156e7, 8766
OWNED_USD = 3000 + 0.6 * 3 * HOURS_A_YEAR * 0.15  # a PC around a 4090 (assumed), 600 W at 15 cents a kWh
LIFE_YEARS = 10.0  # of a card; a run that takes longer is none


def on_one_card(claim: Claim, results: Results) -> Finding:
    """States of 16 bytes a parameter have a place beside one card, and a run of 20 tokens a parameter ends within the
    card's life of ten years; in part if only the first."""
    parameters = claim.number() * 1e9
    needed, years = 16 * parameters / 1e12, _years(parameters, 20 * parameters)
    checks = (
        Check(f"{needed:.1f} TB of states fit drives, and {years:,.0f} years are at most ten", years <= LIFE_YEARS),
        in_part(compare("TB of states beside one card", needed, most=16.0)),
    )
    text = (
        f"To hold is not to train: states of 100 billion parameters take {needed:.1f} TB of drives, which one computer "
        f"holds; twenty tokens a parameter take {years:,.0f} years at 80 TFLOP/s, half of a 4090's peak."
    )
    return found(claim, checks, text, "A run of 100B on one card that somebody finished.", "high", f"{BYTES}; 6 P T")


def slower_with_offload(claim: Claim, results: Results) -> Finding:
    """An update in the host's memory slows a step on a GPU by as much as is claimed; in part if a streamed one does."""
    there = results.on_gpu(CHAPTER, "step/torchao/fp32") - 1
    streamed = results.on_gpu(CHAPTER, "step/host/fp32") - 1
    least, most = (end / 100 for end in claim.bounds())
    checks = (
        compare("share added by an update on the host", there, least, most),
        in_part(compare("share added by streamed moments", streamed, least, most)),
    )
    text = (
        f"At 355M and 8,192 tokens a step the update on the host (torchao) adds {there:.0%}, moments streamed from its "
        f"memory {streamed:.0%}; both fall as the tokens of a step rise."
    )
    return found(claim, checks, text, "The tokens of the step that ZeRO-Offload's figure is of.", "medium")


def not_quantization(claim: Claim, results: Results) -> Finding:
    """None of the methods that the same document counts stores quantized states."""
    own = [c.id for c in ledger.claims() if c.seed == claim.seed and "8-bit optimizer" in c.claim.lower()]
    text = (
        f"The same document counts 8-bit optimizers, which quantize, among its methods ({', '.join(own)})."
        if own else "The document names no quantized method."
    )  # fmt: skip
    checks = (Check("no method of the document quantizes", not own),)
    return found(claim, checks, text, "A statement which of its methods the breakthrough is.", "medium", READ)


def scaling_on_one_device(claim: Claim, results: Results) -> Finding:
    """Scaling efficiency compares several devices with one, so that of one is not defined."""
    text = "Scaling efficiency is the speed of several devices over that of one; for a single device it is not defined."
    return Finding(NOT_CHECKABLE, text, "What Gemini's speed was divided by.")


def tuned_on_one_card(claim: Claim, results: Results) -> Finding:
    """Without a source nothing can be compared; arithmetic adds whether 4-bit weights fit the card."""
    size = claim.number() * NF4_DQ / 8
    fits = "fit" if size <= 24 else "do not fit"
    text = (
        f"No source is named. The weights alone take {size:.1f} GB at {NF4_DQ:.4g} bits and {fits} the card's 24 GB "
        "without "
        "offload."
    )
    return Finding(NOT_CHECKABLE, text, "An account of that fine-tuning, with its method.")


# --- over formulas --------------------------------------------------------------------------------------------


def _saved(sequences: int, layers_kept: int | None = None) -> float:
    """Per cent that a GPU saves where activations and the 16-bit weights of 7B, or of so many layers, stay on it."""
    model = Transformer.preset("llama2-7b")
    layout = Layout(micro_batch=max(1, sequences), global_batch=max(1, sequences))
    held = memory(model, layout, gradient_bytes=2.0, flash=True)
    activations = held.activations + held.working if sequences else 0.0
    states = held.weights + held.gradients + held.states
    kept = held.weights * (1.0 if layers_kept is None else layers_kept / model.layers)
    return 100 * (states - kept) / (states + activations)


def _step_s(parameters: float, tokens: float) -> float:
    """Seconds of a step, or of a whole run, on the card."""
    return offload.FLOPS * parameters * tokens / CARD_FLOPS


def _years(parameters: float, tokens: float) -> float:
    return _step_s(parameters, tokens) / YEAR_S


def _months_of_a_drive(step_s: float) -> float:
    """That 1,200 TB of endurance last if 12 bytes a parameter of 100B are written each step."""
    return 1200e12 / (12 * 100e9) * step_s / 86400 / 30.4


def _loop(ratio: float, policy: str = "lru") -> float:
    """Mean time of a read where 1.1 GB go in a circle through 1 GB and a miss takes so many times as long."""
    return caching.slowdown(caching.loop_miss_share(1.1, 1.0, policy), ratio)


def _paged(tokens: float) -> float:
    """Per cent that a step takes longer if all states go through a drive and back."""
    return 100 * float(offload.slowdown(tokens, Plan(4.0, 12.0, 12.0, 12.0), DRIVE, CARD_FLOPS))


def _worn(tokens: float) -> float:
    """Months of a drive's life if 100B train in steps of so many tokens; a step waits for its transfers."""
    return _months_of_a_drive(max(24 * 100e9 / 5e9, _step_s(100e9, tokens)))


RULES: dict[str, Rule] = {
    "S1-001": on_one_card,
    "S1-002": not_quantization,
    "S1-004": scaling_on_one_device,
    "S1-006": Free(
        "(states - weights) / (states + activations), Llama 2 7B", of=lambda n: _saved(round(n)), over=(1, 32), usual=1,
        name="sequences of 4,096 tokens, from", unit="%", see=CHAPTER,
        says="A GPU with a 7B model saves {0:.0f} % where one sequence of 4,096 tokens is trained, 50 % where "
        "{high:.0f} are, and {1:.0f} % of the states alone. Which memory is meant is not said.",
        conditions=lambda: {"of states alone": _saved(0)},
        would_change="A statement of whose memory is reduced, and at which batch.",
    ),
    "S1-007": slower_with_offload,
    "S1-008": Free(
        "1 - (a layer's 16-bit weights + activations) / (states + activations), Llama 2 7B",
        of=lambda n: _saved(round(n), 1), over=(1, 32), usual=1, name="sequences of 4,096 tokens, from", unit="%",
        claimed=lambda claim: (claim.number(), 100.0), see=CHAPTER,
        conditions=lambda: {"of states alone": _saved(0, 1)},
        says="With states and all but one layer's weights on drives a GPU saves {0:.0f} % where a 7B model trains on "
        "one sequence of 4,096 tokens, less where on more, and {1:.1f} % of the states alone.",
        would_change="A batch whose activations stay and take a fifth of all memory.",
    ),
    "S1-009": Free(
        "24 bytes a parameter through 5 GB/s, over 6 FLOPs a parameter and token at 80 TFLOP/s", of=_paged,
        over=(2**10, 2**24), usual=2**14, name="tokens a step, from", unit="%", confidence="medium", see=CHAPTER,
        says="30 to 50 % is what paging adds to steps of {low:,.0f} to {high:,.0f} tokens on a 4090; steps of 16,384 "
        "it slows by {0:,.0f} %. Nothing overlaps here; the model's size cancels.",
        would_change="The tokens of a step that ZeRO-Infinity's figure is of.",
    ),
    "S1-015": Free(
        "24 bytes a parameter through 5 GB/s, over 6 FLOPs a parameter and token at 80 TFLOP/s", of=_paged,
        over=(2**10, 2**24), usual=2**14, name="tokens a step, from", unit="%", confidence="medium", see=CHAPTER,
        conditions=lambda: {"times as long as on 128 H100": 128 * H100_FLOPS / CARD_FLOPS},
        says="Against the same card without paging, for steps of {low:,.0f} to {high:,.0f} tokens. Against the cluster "
        "of its sentence, 128 H100, a 4090 takes {1:.0f} times as long. What is acceptable is opinion.",
        would_change="What the penalty of 30 to 50 % is measured against.",
    ),
    "S1-018": tuned_on_one_card,
    "S1-019": RangeFormula(
        "bytes / 80 GB",
        lambda: {"all parameters at 16 bytes": 70 * 16 / 80, "LoRA on bf16 weights": 70 * 2 / 80},
        "Tuning all of 70B takes {0:.0f} A100 of 80 GB for its states, LoRA on bf16 weights {1:.2f}. Which of them was "
        "done is not said.",
        "The method of the fine-tuning that is meant.", "GPUs", see=CHAPTER,
    ),
    "S1-020": Free(
        "TB of drives / 16 bytes a parameter", of=lambda terabytes: terabytes / 16, over=(1, 64), usual=2,
        name="TB of drives, from", see=CHAPTER, claimed=lambda claim: (claim.number(), claim.number()),
        conditions=lambda: {"years for 20 tokens a parameter": _years(1e12, 20e12)},
        says="States of a trillion parameters fit {low:.0f} TB of drives; a drive of 2 TB holds {0:.3f} trillion. To "
        "hold is not to train: twenty tokens a parameter take {1:,.0f} years.",
        would_change="A demonstration instead of a theoretical size.",
    ),
    "S1-023": RangeFormula(
        f"70e9 * bits / 8, of 80 GB; {NF4_DQ:.4g} bits for NF4 with double quantization",
        lambda: {"4-bit weights and adapters": 70 * NF4_DQ / 8, "adapters on bf16 weights": 70.0 * 2},
        "With 4-bit weights, {0:.0f} GB, and adapters 70B fits one card of 80 GB; adapters on bf16 weights need "
        "{1:.0f}, "
        "all parameters {2:,.0f}.",
        "Weights of 70B that no format brings below 80 GB.", "GB", claimed=(0.0, 80.0), within=0.0, see=CHAPTER,
        conditions=lambda: {"all parameters at 16 bytes": 70.0 * 16},
    ),
    "S1-024": Formula(
        "dollars a GPU hour / TFLOP/s, rented over owned for three years",
        lambda: {
            f"against an H100 at {usd} dollars an hour": usd / H100_FLOPS * 3 * HOURS_A_YEAR * CARD_FLOPS / OWNED_USD
            for usd in (2.0, 4.4)
        },
        "An own 4090 for three years computes {0:.1f} to {1:.1f} times as cheaply as a rented H100, electricity "
        "included, not a thousand times. What scope is similar is not said.",
        "Hardware that does the same work for a thousandth of the money.", "x", see=CHAPTER,
    ),
    "S1-030": Free(
        "GPUs * 400 / 80 TFLOP/s", of=lambda gpus: gpus * H100_FLOPS / CARD_FLOPS, over=(8, 25_000), usual=128,
        name="H100 in the cluster, from", see=CHAPTER, conditions=lambda: {"against 8": 8 * H100_FLOPS / CARD_FLOPS},
        says="A 4090 at half of its peak is {0:.0f} times slower than 128 H100 and {1:.0f} times slower than one node "
        "of eight: no cluster is only ten to twenty times as fast.",
        would_change="A cluster of two to four H100.",
    ),
    "S1-031": Free(
        "weights forward and backward, gradients out: 6 bytes a parameter and step",
        of=lambda billions: 6 * billions, over=(1, 1000), usual=100, name="billion parameters, from", unit="GB",
        claimed=(10.0, 99.0), within=0.1, see=CHAPTER,
        says="A step pages tens of gigabytes for models of {low:.1f} to {high:.0f} billion parameters; for the 100 "
        "billion of the document it is {0:.0f}.",
        would_change="A period for the paging that is meant.",
    ),
    "S1-032": Free(
        "1,200 TB of endurance / 12 bytes a parameter and step, 100B", of=_worn, over=(2**12, 2**24), usual=2**16,
        name="tokens a step, from", unit="months", claimed=(1.0, 12.0), within=0.1, confidence="medium", see=CHAPTER,
        says="A drive of 1,200 TB endurance lasts months if 100B train in steps of {low:,.0f} to {high:,.0f} tokens, "
        "and {0:.1f} months in steps of 65,536.",
        would_change="States that stay in memory, so that drives are only read.",
    ),
    "S3-036": Free(
        "1 + (ratio - 1) * share of misses, 1.1 GB read in a circle through 1 GB", of=_loop, over=(2, 10_000),
        usual=100,
        name="times that the slow level is slower, from", confidence="medium", claimed=(100.0, 100.0), within=0.1,
        conditions=lambda: {"with the best eviction": _loop(100, "best")},
        says="A loop over 1.1 GB misses on every read where the least recently used goes: it slows down by the ratio "
        "of the levels, 100 if that is 100, with the best eviction {1:.0f} times. Theirs is unpublished.",
        would_change="A reading order that reuses what it has just read.",
    ),
    "S3-052": Formula(
        "16 / 2 bytes; 13e9 / 1.4e9",
        lambda: {"by bytes, with 16-bit weights on the GPU": 16 / 2, "as ZeRO-Offload reports it": 13 / 1.4},
        "By bytes eight times larger, as the 16-bit weights stay on the GPU; the authors of ZeRO-Offload report 13 "
        "billion parameters in place of 1.4 on one card, {1:.1f} times.",
        "Weights that leave the GPU too.", "x", see=CHAPTER, confidence="medium",
    ),
    "S3-055": Formula(
        "50 MB of cache (S3-041) * 8 / bits",
        lambda: {"in bf16": 50e6 / 2 / 1e9},
        "The 50 MB of an H100's L2 hold {0:.3f} billion parameters in bf16 and {1:.3f} at four bits, not one.",
        "A GPU with a cache of half a gigabyte or more.", "billion parameters",
        conditions=lambda: {"at 4 bits with scales": 50e6 * 8 / STORED / 1e9},
    ),
    "S3-056": RangeFormula(
        "bytes / 80 GB", lambda: {"deployed in bf16": 7 * 2 / 80},
        "Deployed in bf16, as its sentence has it, 7B takes {0:.0%} of 80 GB; training it at 16 bytes a parameter "
        "would "
        "take {1:.0%}.",
        "A card of less than 14 GB.", "of the card", claimed=(0.0, 1.0), within=0.0, see=CHAPTER,
        conditions=lambda: {"trained at 16 bytes": 7 * 16 / 80},
    ),
    "S3-057": RangeFormula(
        "bytes / 80 GB, more than one card",
        lambda: {"70B in bf16": 70 * 2 / 80, "34B in bf16": 34 * 2 / 80, "13B in bf16": 13 * 2 / 80},
        "In bf16 70B needs {0:.2f} cards of 80 GB; 34B takes {1:.0%} of one and 13B {2:.0%}, so these need no model "
        "parallelism. At four bits 70B fits too.",
        "A card of 26 GB or less.", "cards", claimed=(1.0, 1e9), within=0.0, see=CHAPTER,
    ),
}  # fmt: skip

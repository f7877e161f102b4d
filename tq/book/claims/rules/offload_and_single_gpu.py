"""Rules over offloading, and over what the documents say of single devices."""

from __future__ import annotations

from tq.book.claims import ledger
from tq.book.claims.formulas import NF4_DQ, STORED, Formula, Free, RangeFormula
from tq.book.claims.ledger import NOT_CHECKABLE, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems import Layout, Transformer, memory, offload
from tq.systems.offload import Place, Plan

CHAPTER = "offload-and-single-gpu"
READ = "the document's other claims, data/claims.csv"
CARD_FLOPS, H100_FLOPS = 80e12, 400e12  # a second: half of a 4090's peak, and what runs on H100 realise
DRIVE = Place("NVMe", 5e9, 5e9, False)
BYTES = "2 (weight) + 2 (gradient) + 4 (master) + 8 (moments) bytes per parameter"
PAGED = "The time to page 24 bytes per parameter at 5 GB/s, over 6 FLOPs per parameter and token at 80 TFLOP/s"
YEAR_S, HOURS_A_YEAR = 3.156e7, 8766
OWNED_USD = 3000 + 0.6 * 3 * HOURS_A_YEAR * 0.15  # a PC around a 4090 (assumed), 600 W at 15 cents a kWh
LIFE_YEARS = 10.0  # of a card; a run that takes longer is none


def on_one_card(claim: Claim, results: Results) -> Finding:
    """Reproduced if training states of 16 bytes per parameter fit beside one card and a run of 20 tokens per parameter
    ends within ten years, the card's assumed life. A part holds if the states fit but the run does not end."""
    parameters = claim.number() * 1e9
    needed, years = 16 * parameters / 1e12, _years(parameters, 20 * parameters)
    checks = (
        Check(f"{needed:.1f} TB of states, and a run of {years:,.0f} years (required: at most {LIFE_YEARS:.0f} years)",
              years <= LIFE_YEARS),
        in_part(compare("TB of states beside one card", needed, most=16.0)),
    )  # fmt: skip
    text = (
        f"A run over 20 tokens per parameter is computed to take {years:,.0f} years at 80 TFLOP/s, half of a 4090's "
        f"peak. The training states of {parameters / 1e9:,.0f} billion parameters take {needed:.1f} TB of drives, "
        f"which one computer {'can' if checks[1].holds else 'cannot'} hold."
    )
    return found(claim, checks, text, "A finished training run of 100B on one card.", "high", f"{BYTES}; 6 P T")


def not_quantization(claim: Claim, results: Results) -> Finding:
    """Reproduced if none of the methods that the same document lists stores quantized states."""
    own = [c for c in ledger.claims() if c.seed == claim.seed and "8-bit optimizer" in c.claim.lower()]
    text = (
        "The same document lists 8-bit optimizers, which quantize the optimizer state, among its own methods."
        if own else "The document names no method that quantizes."
    )  # fmt: skip
    checks = (Check("no method that the document lists quantizes", not own),)
    return found(claim, checks, text, "A statement of which of its methods is the breakthrough.", "medium", READ)


def scaling_on_one_device(claim: Claim, results: Results) -> Finding:
    """Not checkable: scaling efficiency compares several devices with one, so it is not defined for a single device."""
    text = "Scaling efficiency is the speed of several devices over that of one. For a single device it is not defined."
    return Finding(NOT_CHECKABLE, text, "A statement of what Gemini's speed was divided by.")


def tuned_on_one_card(claim: Claim, results: Results) -> Finding:
    """Not checkable: without a source nothing can be compared. Arithmetic adds whether 4-bit weights fit the card."""
    size = claim.number() * NF4_DQ / 8
    fits = "fit" if size <= 24 else "do not fit"
    text = (
        f"The document names no source for this fine-tuning. The weights alone are computed to take {size:.1f} GB at "
        f"{NF4_DQ:.4g} bits per parameter and {fits} the card's 24 GB without offloading."
    )
    return Finding(NOT_CHECKABLE, text, "A published account of the fine-tuning and its method.")


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
    """That 1,200 TB of endurance last if 12 bytes per parameter of 100B are written each step."""
    return 1200e12 / (12 * 100e9) * step_s / 86400 / 30.4


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
        name="batch sizes in sequences of 4,096 tokens", unit="%", see=CHAPTER,
        says="Offloading a 7B model is modelled to save {0:.0f}% of GPU memory with one sequence of 4,096 tokens, and "
        "about 50% with {high:.0f} sequences. Of the states alone it saves {1:.0f}%; the memory is not named.",
        conditions=lambda: {"of states alone": _saved(0)},
        would_change="A statement of which memory is reduced, and at which batch size.",
    ),
    "S1-008": Free(
        "1 - (a layer's 16-bit weights + activations) / (states + activations), Llama 2 7B",
        of=lambda n: _saved(round(n), 1), over=(1, 32), usual=1, name="batch sizes in sequences of 4,096 tokens",
        unit="%", claimed=lambda claim: (claim.number(), 100.0), see=CHAPTER,
        conditions=lambda: {"of states alone": _saved(0, 1)},
        says="Keeping all but one layer of a 7B model on drives is modelled to save {0:.0f}% of GPU memory with one "
        "sequence of 4,096 tokens, within a tenth of 90%. More sequences save less, the states alone {1:.1f}%.",
        would_change="A batch whose activations stay on the GPU and take a fifth of all memory.",
    ),
    "S1-009": Free(
        PAGED, of=_paged, over=(2**10, 2**24), usual=2**14, name="step sizes in tokens", unit="%",
        confidence="medium", see=CHAPTER,
        says="Paging to a drive is modelled to add 30 to 50%, within a tenth, to steps of {low:,.0f} to {high:,.0f} "
        "tokens on a 4090, and {0:,.0f}% to 16,384 tokens. No transfer overlaps; the model's size cancels.",
        would_change="The tokens per step behind ZeRO-Infinity's figure.",
    ),
    "S1-015": Free(
        PAGED, of=_paged, over=(2**10, 2**24), usual=2**14, name="step sizes in tokens", unit="%",
        confidence="medium", see=CHAPTER,
        conditions=lambda: {"times as long as on 128 H100": 128 * H100_FLOPS / CARD_FLOPS},
        says="Against the same card without paging, about 30 to 50% is modelled for steps of {low:,.0f} to {high:,.0f} "
        "tokens. Against 128 H100 a 4090 takes {1:.0f} times as long; what is acceptable is opinion.",
        would_change="A statement of what the penalty of 30 to 50% is measured against.",
    ),
    "S1-018": tuned_on_one_card,
    "S1-019": RangeFormula(
        "The bytes that the method holds / 80 GB",
        lambda: {"all parameters at 16 bytes": 70 * 16 / 80, "LoRA on bf16 weights": 70 * 2 / 80},
        "Fine-tuning all parameters of 70B is computed to take {0:.0f} A100 of 80 GB for its states, LoRA on bf16 "
        "weights {1:.2f}. The document does not say which was done.",
        "The method of the fine-tuning that the document means.", "GPUs", see=CHAPTER,
    ),
    "S1-020": Free(
        "TB of drives / 16 bytes per parameter", of=lambda terabytes: terabytes / 16, over=(1, 64), usual=2,
        name="drive capacities in TB", see=CHAPTER, claimed=lambda claim: (claim.number(), claim.number()),
        conditions=lambda: {"years for 20 tokens per parameter": _years(1e12, 20e12)},
        says="The training states of a trillion parameters are computed to fit on 16 TB of drives; a 2 TB drive holds "
        "{0:.3f} trillion. Training on 20 tokens per parameter would take {1:,.0f} years on a 4090.",
        would_change="A demonstration instead of a theoretical model size.",
    ),
    "S1-023": RangeFormula(
        f"70e9 * bits / 8, with {NF4_DQ:.4g} bits for NF4 with double quantization, on a card of 80 GB",
        lambda: {"4-bit weights and adapters": 70 * NF4_DQ / 8, "adapters on bf16 weights": 70.0 * 2},
        "A 70B model with 4-bit weights and adapters is computed to take {0:.0f} GB: it fits one card of 48 or 80 GB, "
        "not one of 24. Adapters on bf16 weights need {1:.0f} GB, training all parameters {2:,.0f}.",
        "A 70B model whose weights no format brings below 80 GB.", "GB", claimed=(0.0, 80.0), within=0.0, see=CHAPTER,
        conditions=lambda: {"all parameters at 16 bytes": 70.0 * 16},
    ),
    "S1-024": Formula(
        "The price per FLOP of a rented H100 over that of an owned 4090 for three years",
        lambda: {
            f"against an H100 at ${usd:.2f} per hour": usd / H100_FLOPS * 3 * HOURS_A_YEAR * CARD_FLOPS / OWNED_USD
            for usd in (2.0, 4.4)
        },
        "A rented H100 is computed to cost {0:.1f} to {1:.1f} times as much per FLOP as a 4090 owned for three years, "
        "electricity included. The claim needs a thousand times; similar scope is not defined.",
        "Hardware that does the same work for a thousandth of the money.", "x", see=CHAPTER,
    ),
    "S1-030": Free(
        "H100 GPUs * 400 TFLOP/s / 80 TFLOP/s of a 4090",
        of=lambda gpus: gpus * H100_FLOPS / CARD_FLOPS, over=(8, 25_000), usual=128,
        name="cluster sizes in H100", see=CHAPTER, conditions=lambda: {"against 8": 8 * H100_FLOPS / CARD_FLOPS},
        says="A 4090 at half of its peak is computed to be {0:.0f} times slower than 128 H100, and {1:.0f} times "
        "slower than eight. Two to four H100 are 10 to 20 times as fast.",
        would_change="A statement that the cluster has two to four H100.",
    ),
    "S1-031": Free(
        "6 bytes per parameter and step (weights read forward and backward, gradients written)",
        of=lambda billions: 6 * billions, over=(1, 1000), usual=100, name="model sizes in billion parameters",
        unit="GB", claimed=(10.0, 99.0), within=0.1, see=CHAPTER,
        conditions=lambda: {"with optimizer states, 24 bytes per parameter": 24.0 * 100},
        says="A step is computed to page tens of gigabytes, within a tenth, for models of {low:.1f} to {high:.0f} "
        "billion parameters. For the document's 100 billion, weights and gradients are {0:.0f} GB, with optimizer "
        "states {1:,.0f} GB.",
        would_change="A statement of the period in which tens of gigabytes are paged.",
    ),
    "S1-032": Free(
        "1,200 TB of endurance / (12 bytes per parameter and step * 100e9)", of=_worn, over=(2**12, 2**24), usual=2**16,
        name="step sizes in tokens", unit="months", claimed=(1.0, 12.0), within=0.0, confidence="medium", see=CHAPTER,
        says="A drive with 1,200 TB endurance is modelled to last 1 to 12 months with a 100B model in steps of "
        "{low:,.0f} to {high:,.0f} tokens. In steps of 65,536 tokens it lasts {0:.1f} months.",
        would_change="States that stay in memory, so that drives are only read.",
    ),
    "S3-052": Formula(
        "16 bytes per parameter over the 2 that stay on the GPU, or the printed 13e9 / 1.4e9 parameters",
        lambda: {"by bytes, with 16-bit weights on the GPU": 16 / 2, "as ZeRO-Offload's authors print it": 13 / 1.4},
        "Offloading states and gradients is computed to allow {0:.0f} times larger models, as the 16-bit weights stay "
        "on the GPU. ZeRO-Offload's authors print 13 billion parameters instead of 1.4 on one card, {1:.1f} times.",
        "Offloading that moves the weights off the GPU too.", "x", see=CHAPTER, confidence="medium",
    ),
    "S3-055": Formula(
        "50 MB of L2 cache on an H100 * 8 / bits per parameter",
        lambda: {"in bf16": 50e6 / 2 / 1e9},
        "The 50 MB L2 cache of an H100 is computed to hold {0:.3f} billion parameters in bf16. In 4 bits with scales "
        "it holds {1:.3f} billion.",
        "A GPU with a cache of half a gigabyte or more.", "billion parameters",
        conditions=lambda: {"at 4 bits with scales": 50e6 * 8 / STORED / 1e9},
    ),
    "S3-056": RangeFormula(
        "The bytes of the weights / 80 GB", lambda: {"deployed in bf16": 7 * 2 / 80},
        "A 7B model deployed in bf16 is computed to take {0:.0%} of a card of 80 GB. Training it at 16 bytes per "
        "parameter would take {1:.0%}.",
        "A card with less than 14 GB.", "of the card", claimed=(0.0, 1.0), within=0.0, see=CHAPTER,
        conditions=lambda: {"trained at 16 bytes": 7 * 16 / 80},
    ),
    "S3-057": RangeFormula(
        "The bytes of the weights / 80 GB, above one card",
        lambda: {"70B in bf16": 70 * 2 / 80, "34B in bf16": 34 * 2 / 80, "13B in bf16": 13 * 2 / 80},
        "In bf16 a 70B model is computed to need {0:.2f} cards of 80 GB, but 34B takes {1:.0%} of one card and 13B "
        "{2:.0%}. Those two need no model parallelism, and 70B in 4 bits needs none either.",
        "Cards with 26 GB or less.", "cards", claimed=(1.0, 1e9), within=0.0, see=CHAPTER,
    ),
}  # fmt: skip

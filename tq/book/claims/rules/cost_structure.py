"""Rules over prices, the whitepaper's table of costs, and what runs and clusters take."""

from __future__ import annotations

import math

from tq.book.claims import ledger
from tq.book.claims.formulas import NF4_DQ, STORED, Figure, Formula, Free, RangeFormula, gigabytes
from tq.book.claims.ledger import NOT_CHECKABLE, PRINTED, UNDECIDED, Claim, Finding, Results, Rule, found
from tq.book.claims.sums import dollars, meet, printed, snapshot, two_digits
from tq.book.claims.tolerance import NUMBER, tolerance
from tq.book.claims.words import Check, compare, in_part
from tq.systems import Transformer, hardware, lora, offload

CHAPTER = "cost-structure"
Ends = tuple[float, float]
SXM_HZ = 1.98e9  # boost clock of an H100 SXM, the highest
WEEKS = 13.0  # from which on one says months


def _pair(results: Results, key: str) -> Ends:
    return results(CHAPTER, f"{key}/low"), results(CHAPTER, f"{key}/high")


def _millions(claim: Claim) -> Ends:
    """The bounds of the claimed sum in millions of dollars."""
    scale = {"$M": 1.0, "$B": 1e3, "$": 1e-6}[claim.unit]
    return printed(claim)[0] * scale, printed(claim)[1] * scale


# --- prices ---------------------------------------------------------------------------------------------------


def _price(column: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if the lowest and the highest dated offer equal the two ends of the claimed range, each within its
        tolerance. A part holds if the two ranges overlap. Otherwise the claim is not checkable, because prices of its
        month were not found: later ones cannot refute it."""
        low, high = _pair(results, f"price/{column}")
        (least, most), (below, above) = claim.ends(), claim.within()
        checks = (
            compare("lowest offer", low, least * (1 - below), least * (1 + below), "USD/h"),
            compare("highest offer", high, most * (1 - above), most * (1 + above), "USD/h"),
            meet("offers", (low, high), claim.bounds(), "USD/h"),
        )
        number, ends = results(CHAPTER, f"price/{column}/offers"), dict.fromkeys((f"${low:.2f}", f"${high:.2f}"))
        gpu, kind = column.upper().split("/")[0], "large" if column.endswith("major") else "specialised"
        text = (
            f"Printed {gpu} prices of {kind} clouds are {' to '.join(ends)} per GPU-hour (n = {number:.0f}, "
            f"read in {snapshot()}). Prices of March 2026, which the document names, were not found."
        )
        if not checks[-1].holds:
            return Finding(NOT_CHECKABLE, text, change, checks=checks)
        return found(claim, checks, text, change, "medium", basis=PRINTED)

    return rule


def _spot(gpu: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if a named and dated offer is at the claimed price or below. Otherwise the claim is not checkable,
        because prices of its month were not found."""
        lowest = results(CHAPTER, f"price/{gpu}/spot/low")
        least, most = claim.bounds()
        text = f"The lowest printed spot price of the {gpu.upper()} is ${lowest:.2f} per hour (read in {snapshot()})."
        if lowest > most:
            text += " Offers of March 2026, which the document names, were not found."
            return Finding(NOT_CHECKABLE, text, change)
        return found(claim, (compare("lowest offer, USD/h", lowest, most=most),), text, change, "low", basis=PRINTED)

    return rule


# --- the whitepaper's table of costs --------------------------------------------------------------------------

TOKENS = {
    "20-a-parameter": "20 tokens per parameter", "gpt-3": "GPT-3's token count", "llama-2": "Llama 2's token count",
    "llama-3.1-405b": "the size and tokens of Llama 3.1 405B",
}  # fmt: skip
HOURS = "6 * parameters * tokens / (peak * share of the peak)"


def _cost(row: str, runs: tuple[str, ...], change: str, asked: str = "on-demand/h100", own: bool = True) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if every named run costs the claimed sum at the median dated price and, where the document lists
        a price of the row's GPU, the row's dollars per GPU-hour lie in that list. A part holds if one does, or if any
        dated price gives the sum."""
        prices = [results(CHAPTER, f"{asked}/{end}") for end in ("low", "mid", "high")]
        checks, said = [], []
        for run in runs:
            low, mid, high = (results(CHAPTER, f"needed/{row}/{run}/{end}") for end in ("low", "mid", "high"))
            cost = f"cost in USD with {TOKENS[run]}"
            checks.append(compare(f"{cost}, median price", mid * prices[1], *printed(claim)))
            checks.append(meet(f"{cost}, all prices", (low * prices[0], high * prices[2]), printed(claim)))
            said.append(f"{dollars(mid * prices[1])} with {TOKENS[run]}")
        text = f"At the median dated price a {row.replace('b', 'B')} run is modelled to cost {' and '.join(said)}."
        if own:
            implied = _pair(results, f"row/{row}/implied")
            listed = ledger.claim("S0-022").number(), ledger.claim("S0-020").ends()[1]
            checks += [compare("the row's dollars over its GPU-hours", each, *listed, "USD/h") for each in implied]
            text += f" The whitepaper's row implies ${implied[0]:.2f} to ${implied[1]:.2f} per GPU-hour, its price list"
            text += f" ${listed[0]:.2f} to ${listed[1]:.2f}."
        else:
            text += " The whitepaper's price list has no H200."
        return found(claim, checks, text, change, "medium", f"{HOURS} * price")

    return rule


def _hours(row: str, run: str, change: str, beside: str = "") -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if the GPU-hours that the named run needs, in the median of published runs, lie in the row's
        range, whose ends have the tolerance of the row's duration. A part holds if the 80 % interval of the need
        overlaps the range, or, with a plus sign, one up to twice as high; or if the row's hours lie between that need
        and the need with another token count."""
        have, need = _pair(results, f"row/{row}/hours"), _pair(results, f"needed/{row}/{run}")
        mid, off = results(CHAPTER, f"needed/{row}/{run}/mid"), tolerance(NUMBER.findall(claim.value)[-1])
        least, most = have[0] * (1 - off), have[1] * (1 + off)
        hours, what = f"{have[0]:,.0f} to {have[1]:,.0f} GPU-hours", f"GPU-hours with {TOKENS[run]}"
        text = (
            f"The whitepaper's {row.replace('b', 'B')} row has {two_digits(least)} to {two_digits(most)} GPU-hours, "
            f"tolerance included; the model gives {two_digits(mid)} with "
            f"{TOKENS[run]} (80% interval {two_digits(need[0])} to {two_digits(need[1])})."
        )
        checks = [compare(f"{what}, median", mid, least, most), meet(f"{what}, 80 % interval", need, (least, most))]
        if beside:
            other = _pair(results, f"needed/{row}/{beside}")
            between = min(need[0], other[0]) <= have[0] and have[1] <= max(need[1], other[1])
            checks.append(Check(f"{hours} lie between that need and the need with {TOKENS[beside]}", between, True))
            text += f" With {TOKENS[beside]} the run needs {two_digits(other[0])} to {two_digits(other[1])}."
        if claim.quantifier == "at least":
            checks.append(meet(f"{what}, for up to twice as many GPUs", need, (least, 2 * most)))
            text += " The row's plus sign allows more GPUs."
        return found(claim, checks, text, change, "medium", HOURS)

    return rule


# --- costs in the other documents -----------------------------------------------------------------------------


def _published(runs: tuple[str, ...], change: str, shorter: str = "") -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if every named published run costs the claimed sum at the median dated price. A part holds if one
        does, or if a cost at any dated price, or of a run on 20 tokens per parameter, lies in the claimed range."""
        least, most = _millions(claim)
        checks, said = [], []
        for run in runs:
            low, mid, high = (results(CHAPTER, f"cost/{run}/{end}") for end in ("low", "mid", "high"))
            checks.append(compare(f"{RUNS[run]} at the median price, million USD", mid, least, most))
            checks.append(meet(f"{RUNS[run]} at all prices, million USD", (low, high), (least, most)))
            ends = f"({dollars(low * 1e6)} to {dollars(high * 1e6)} over all prices)"
            said.append(f"{RUNS[run]} is computed to cost {dollars(mid * 1e6)} at the median price of 2026 {ends}.")
        if shorter:
            hours, prices = _pair(results, f"needed/{shorter}/20-a-parameter"), _pair(results, "on-demand/h100")
            short = hours[0] * prices[0] / 1e6, hours[1] * prices[1] / 1e6
            checks.append(meet("a run on 20 tokens per parameter, million USD", short, (least, most)))
            said.append(f"One on 20 tokens per parameter costs {dollars(short[0] * 1e6)} to {dollars(short[1] * 1e6)}.")
        return found(claim, checks, " ".join(said), change, "medium", "GPU-hours * price")

    return rule


RUNS = {
    "gpt-4": "The GPT-4 run as reported", "l2-7b": "Llama 2 7B", "l2-70b": "Llama 2 70B",
    "l31-hours-70b": "Llama 3.1 70B", "l31-hours-405b": "Llama 3.1 405B",
}  # fmt: skip


def billion(claim: Claim, results: Results) -> Finding:
    """Reproduced if the document's GPU-hours at the median dated price, plus its upper end of $99 million for
    engineering, come to the claimed sum. A part holds if they do at the highest price. Undecided if they stay below it
    at every price, because the document counts data too and nothing prices them."""
    mid, high = results(CHAPTER, "textbook/usd/mid"), results(CHAPTER, "textbook/usd/high")
    least, most = _millions(claim)
    checks = (
        compare("computing at the median price plus 99 for engineering, million USD", mid + 99, least, most),
        in_part(compare("the same at the highest price, million USD", high + 99, least, most)),
    )
    text = (
        f"The document's 60 million H100-hours are computed to cost ${mid:,.0f}M at the median dated price and "
        f"${high:,.0f}M at the highest, engineers at most $99M. Data would have to cost the rest; they are not priced."
    )
    change, formula = "What the data of a frontier run cost.", "GPUs * hours * price"
    if high + 99 < least:
        return Finding(UNDECIDED, text, change, "low", formula, checks=checks)
    return found(claim, checks, text, change, "medium", formula)


def weeks(claim: Claim, results: Results) -> Finding:
    """Reproduced if the run takes 2 to 13 weeks (longer times are called months) at the median share of the peak of
    published runs. A part holds if it does at the best tenth of those shares."""
    low, mid = (results(CHAPTER, f"textbook/weeks-on-eight-4090/{end}") for end in ("low", "mid"))
    checks = (
        compare("weeks at the median share of the peak", mid, 2.0, WEEKS),
        in_part(compare("weeks at the best tenth", low, 2.0, WEEKS)),
    )
    text = (
        f"A 7B model on eight RTX 4090 is modelled to take {mid:.0f} weeks for 100 billion tokens at published runs' "
        f"median utilization. At the best tenth the run takes {low:.0f} weeks; no such run is published."
    )
    return found(claim, checks, text, "A timed 7B run on a workstation with eight RTX 4090.", "low", HOURS)


def orders(claim: Claim, results: Results) -> Finding:
    """Reproduced if the training operations of Llama 3.1 405B over those of GPT-3 come to the claimed orders of
    magnitude."""
    orders = results(CHAPTER, "textbook/orders-gpt-3-to-405b")
    text = (
        f"From GPT-3 to Llama 3.1 405B the training operations grow by {orders:.1f} orders of magnitude (computed). "
        "No larger run of 2024 has published its compute; the document's own exponents are lost."
    )
    checks = (compare("orders of magnitude", orders, *claim.bounds()),)
    return found(claim, checks, text, "A 2024 model with published compute of 1.6e26 operations or more.", "medium")


def _peak(gpu: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if the dense 16-bit rate that the data sheet prints (data/hardware.csv) is the claimed one."""
        rate, name = results(CHAPTER, f"peak/{gpu}"), gpu.split("-")[0].upper()
        text = f"NVIDIA's data sheet of the {name} prints {rate:g} dense 16-bit TFLOP/s. No {name} was measured here."
        return found(claim, (compare("printed TFLOP/s", rate, *claim.bounds()),), text, change, "medium", basis=PRINTED)

    return rule


def days(claim: Claim, results: Results) -> Finding:
    """At most a part holds, because operations and days come from one unofficial account. It holds if 25,000 A100 take
    90 or 100 days for these operations at a share of the peak that published runs reached."""
    low, high = claim.ends()
    peak = results(CHAPTER, "peak/a100-80gb") * 1e12
    share = [2.15e25 / (25_000 * peak * 86_400 * day) for day in (high, low)]
    seen = results(CHAPTER, "realised/low"), results(CHAPTER, "realised/high")
    checks = (
        Check("an account by the model's own maker", False),
        *(in_part(compare("needed share of the peak", each, *seen)) for each in share),
    )
    text = (
        f"25,000 A100 are computed to finish an estimated 2.15e25 operations in {low:.0f} to {high:.0f} days at "
        f"{share[0]:.0%} to {share[1]:.0%} of peak. Published runs reached {seen[0]:.0%} to {seen[1]:.0%}."
    )
    return found(claim, checks, text, "OpenAI's own account of the GPT-4 run.", "low", "FLOP / (GPUs * peak * days)")


def generations(claim: Claim, results: Results) -> Finding:
    """Reproduced if every step of the dense 16-bit peak from V100 to B200 lies in the claimed range."""
    ends = results(CHAPTER, "peak-step/low"), results(CHAPTER, "peak-step/high")
    named = zip(("smallest", "largest"), ends, strict=True)
    checks = [compare(f"{name} step", step, *claim.bounds(), "x") for name, step in named]
    text = f"Printed dense 16-bit peaks grow {ends[0]:.1f} to {ends[1]:.1f} times per generation from V100 to B200."
    return found(claim, checks, text, "Measured rates with a step outside the claim.", "high", basis=PRINTED)


def lost_day(claim: Claim, results: Results) -> Finding:
    """Reproduced if a day of 25,000 H100 costs the claimed sum or more at some dated price."""
    low, high = _pair(results, "textbook/lost-day")
    text = f"A day of 25,000 H100 is computed to rent for ${low:.1f}M to ${high:.1f}M at dated prices."
    least = _millions(claim)[0]
    checks = compare("million USD at the lowest price", low, least), compare("at the highest", high, least)
    return found(claim, checks, text, "A cluster that costs less than $1.70 per GPU-hour.", "high", "GPUs * 24 * price")


def rented(claim: Claim, results: Results) -> Finding:
    """Reproduced if the document's GPU-hours cost at least the claimed sum at the lowest dated price. A part holds if
    they do at the median price."""
    low, mid = results(CHAPTER, "textbook/usd/low"), results(CHAPTER, "textbook/usd/mid")
    checks = (
        compare("million USD at the lowest price", low, _millions(claim)[0]),
        in_part(compare("at the median price", mid, _millions(claim)[0])),
    )
    text = (
        f"The document's run, 25,000 H100 for 100 days, is computed to cost ${low:,.0f}M at the lowest dated price and "
        f"${mid:,.0f}M at the median. The factors that the document multiplies are lost."
    )
    return found(claim, checks, text, "H100 offers below $1.70 per GPU-hour.", "medium", "GPUs * hours * price")


# --- over formulas --------------------------------------------------------------------------------------------


def _nvme() -> float:
    """GB/s that a PCIe 4.0 drive reads, as its maker prints it in data/stores.csv."""
    return float(offload.place("nvme-gen4").read_bytes_per_s) / 1e9


def _lora_405b() -> dict[str, Figure]:
    """Millions of adapter parameters on q, k, v and o of Llama 3.1 405B."""
    shape = Transformer.preset("llama3-405b")
    return {f"rank {rank}": lora.lora_parameters(shape, rank) / 1e6 for rank in (8, 16, 64)}


def _of(gpu: str, quantity: str) -> float:
    """What `data/hardware.csv` prints of a GPU: "peak_bf16" in TFLOP/s, "memory" in GiB, "hbm" in GB/s."""
    known = hardware.gpu(gpu)
    held, rate = known.memory_bytes / 2**30, known.hbm_bytes_per_s / 1e9
    return {"peak_bf16": known.peak_flops / 1e12, "memory": held, "hbm": rate}[quantity]


RULES: dict[str, Rule] = {
    "S0-020": _price("h100/major", "Price lists of large clouds of March 2026 with other lowest or highest prices."),
    "S0-021": _price("h100/specialised", "Price lists of specialised clouds of March 2026 with the claimed ends."),
    "S0-022": _spot("h100", "A dated spot offer of an H100 at $0.99 per hour."),
    "S0-023": _price("a100/major", "An A100 offer of a large cloud at $5.78 per hour."),
    "S0-024": _price("a100/specialised", "A100 offers of March 2026 between $1.29 and $2.06 per hour."),
    "S0-025": _spot("a100", "A dated spot offer of an 80 GB A100 at $0.74 per hour."),
    "S0-026": _cost("7b", ("20-a-parameter", "llama-2"), "A token count in the whitepaper's 7B row."),
    "S0-027": _hours("7b", "20-a-parameter", "A token count for 7B that needs the row's GPU-hours.", "llama-2"),
    "S0-028": _cost("70b", ("20-a-parameter", "llama-2"), "More GPUs or weeks in the 70B row, to match its dollars."),
    "S0-029": _hours("70b", "20-a-parameter", "A 70B run on fewer than 20 tokens per parameter.", "llama-2"),
    "S0-030": _cost("175b", ("gpt-3",), "Fewer GPU-hours in the 175B row, or a cost that covers all of them."),
    "S0-031": _hours("175b", "gpt-3", "A token count for the 175B row other than GPT-3's.", "20-a-parameter"),
    "S0-032": _cost("frontier", ("llama-3.1-405b",), "A frontier run for less than $23M.", "on-demand/h200", False),
    "S0-033": _hours("frontier", "llama-3.1-405b", "A frontier run on fewer than 2,000 GPUs."),
    "S3-001": _published(("gpt-4",), "An account by OpenAI of what the GPT-4 run cost."),
    "S3-004": days,
    "S3-059": _published(("l2-7b",), "A token count beside the document's price of a 7B run.", "7b"),
    "S3-060": _published(("l2-70b", "l31-hours-70b"), "A token count beside the document's price of a 70B run."),
    "S3-061": _published(("l31-hours-405b",), "A published run above 400B that cost less than $45M."),
    "S4-004": billion,
    "S4-010": weeks,
    "S4-017": orders,
    "S4-030": _peak("v100-32gb", "Another 16-bit rate in NVIDIA's data sheet of the V100."),
    "S4-031": _peak("a100-80gb", "Another 16-bit rate in NVIDIA's data sheet of the A100."),
    "S4-036": generations,
    "S4-084": lost_day,
    "S4-095": rented,
    "S1-016": Free(
        "GPUs * 49,248 dollars with node and network (data/sources.csv)", over=(8, 1024), usual=128, name="GPUs",
        of=lambda gpus: gpus * 0.049248, claimed=Claim.ends, unit="million dollars", confidence="medium", see=CHAPTER,
        says="At the price per GPU of a printed bill of materials for 1,024 H100, {low:.0f} to {high:.0f} are computed "
        "to cost about $5M, and 128 cost ${0:.1f}M. The document names neither the type nor the number of GPUs.",
        would_change="The type and number of GPUs of the cluster that is meant.",
    ),
    "S3-038": Formula(
        "lanes * 2 operands * 4 bytes * 1.98 GHz; an H100 has 132 multiprocessors of 128 lanes",
        lambda: {
            "of one multiprocessor": 128 * 2 * 4 * SXM_HZ / 1e12, "of the whole GPU": 132 * 128 * 2 * 4 * SXM_HZ / 1e12,
        },
        "The registers of one H100 multiprocessor are computed to deliver {0:.1f} TB/s at boost clock, those of the "
        "whole GPU {1:.0f} TB/s. The document does not say which is meant.",
        "A statement whether 2 TB/s belong to one multiprocessor or to the GPU.", "TB/s",
    ),
    "S3-040": Formula(
        "multiprocessors * 128 bytes per clock", lambda: {"of an H100 (132 at 1.98 GHz)": 132 * 128 * SXM_HZ / 1e12},
        "The L1 caches of an H100 are computed to deliver {0:.1f} TB/s together. The claimed figure is that of the "
        "A100, {1:.1f} TB/s by the same formula.",
        "A data sheet with 19 TB/s for the L1 caches of an H100.", "TB/s",
        conditions=lambda: {"of an A100 (108 at 1.41 GHz)": 108 * 128 * 1.41e9 / 1e12},
    ),
    "S3-044": Free(
        "eight channels * 8 bytes * transfer rate", over=(1.6, 8.8), usual=4.8, name="memory rates in GT/s",
        of=lambda rate: 8 * 8 * rate, unit="GB/s", confidence="medium",
        says="Eight memory channels are computed to deliver {0:.0f} GB/s with the DDR5-4800 of H100 hosts, and about "
        "200 GB/s with DDR4-3200. A GPU reads host memory over PCIe, at 63 GB/s.",
        would_change="The host and the number of memory channels that are meant.",
    ),
    "S3-045": Formula(
        "whole drives of PCIe 4.0 (data/stores.csv); one of PCIe 5.0 (Gigabyte Aorus Gen5 10000, geektopia.es, 2023)",
        lambda: {"one PCIe 4.0 drive": _nvme(), "two PCIe 4.0 drives": 2 * _nvme(), "one PCIe 5.0 drive": 10.0},
        "A PCIe 4.0 drive reads {0:.1f} GB/s, two read {1:.1f} and an early PCIe 5.0 drive {2:.0f}, as printed. The "
        "document names neither the drive nor the number.",
        "The type and number of drives that are meant.", "GB/s", confidence="medium", see="offload-and-single-gpu",
        basis=PRINTED,
    ),
    "S4-005": Formula(
        "405e9 * 2 bytes", gigabytes(405e9, in_bf16=16),
        "405 billion weights of 2 bytes are computed to take {0:.0f} GB. Only weights are counted.",
        "Another parameter count of Llama 3.1 405B.", "GB",
    ),
    "S4-006": Formula(
        "405e9 * bits / 8", gigabytes(405e9, as_NF4_with_double_quantization=NF4_DQ),
        "405 billion weights are computed to take {0:.0f} GB in NF4 with double quantization. With an fp32 scale per "
        "128 weights the total is {1:.0f} GB.",
        "A format that stores more than 4.7 bits per weight of the 405B model.", "GB",
        conditions=gigabytes(405e9, with_fp32_scales_every_128=STORED),
    ),
    "S4-007": Formula(
        "126 layers * r * (d_in + d_out) over q, k, v, o", _lora_405b,
        "Rank-8 adapters on the four attention projections of a 405B model have {0:.0f} million parameters (computed), "
        "rank-16 adapters {1:.0f} million. The document names no rank.",
        "A rank in the document that gives another count.", "million", confidence="medium",
    ),
    "S4-008": Formula(
        "8 * 80 GB", lambda: {"of eight cards": 8 * 80.0}, "Eight H100 of 80 GB have {0:.0f} GB (computed).",
        "H100 cards with another memory size than 80 GB.", "GB",
    ),
    "S4-009": RangeFormula(
        "7e9 * (2 + 2 + 4 + 2.06) bytes, beside 8 * 24 GB",
        lambda: {"states with 8-bit Adam": 7 * 10.06},
        "Weights, gradients, master weights and 8-bit moments of 7B are computed to take {0:.0f} of 192 GB on eight "
        "24 GB cards. With fp32 moments the total is {1:.0f} GB; activations come on top.",
        "Activations of more than 120 GB over eight cards.", "GB", conditions=lambda: {"with fp32 moments": 7 * 16.0},
        claimed=(0.0, 192.0), within=0.0, confidence="medium",
    ),
    "S4-012": Formula(
        "log10 of the first instance (60e6 H100-hours, $1B) over the second (8 H100 for a day, $3.99 per hour)",
        lambda: {
            "of operations, at one share of the peak": math.log10(60e6 / (8 * 24)),
            "of dollars": math.log10(1e9 / (8 * 24 * 3.99)),
        },
        "If fine-tuning takes a day, the document's first and second instance are computed to differ by {0:.1f} orders "
        "of magnitude in operations and {1:.1f} in dollars, the first and third by {2:.1f} in operations.",
        "An undamaged copy with the operations of the three instances.", "orders", confidence="low",
        conditions=lambda: {"of operations, the first over the third": math.log10(6.67e25 / (6 * 7e9 * 1e11))},
    ),
    "S4-033": Formula(
        "data sheet of the H100 SXM (data/hardware.csv); fp8: glennklockwood.com/garden/processors/h100",
        lambda: {"dense, bf16 and fp8": (_of("h100-80gb", "peak_bf16"), 1978.9)},
        "NVIDIA's data sheet prints {0:.1f} TFLOP/s for dense bf16, and a page that lists the H100's rates prints "
        "1,978.9 for dense fp8. No H100 was measured here.",
        "Other bf16 or fp8 rates in NVIDIA's data sheet of the H100.", "TFLOP/s", claimed=(990.0, 1979.0), within=0.2,
        confidence="medium", basis=PRINTED,
    ),
    "S4-034": Formula(
        "data sheet of the H200 (data/hardware.csv)", lambda: {"memory": _of("h200-141gb", "memory")},
        "NVIDIA's data sheet of the H200 prints {0:.0f} GB of HBM3e. The size was not measured here.",
        "Another memory size in NVIDIA's data sheet of the H200.", "GB", confidence="medium", basis=PRINTED,
    ),
    "S4-042": RangeFormula(
        "data sheet of the H100 SXM (data/hardware.csv)", lambda: {"memory rate": _of("h100-80gb", "hbm") / 1e3},
        "NVIDIA's data sheet prints {0:.2f} TB/s of memory bandwidth for the H100 SXM. The rate was not measured here.",
        "An H100 with less than 2.7 TB/s, such as the PCIe card.", "TB/s", confidence="medium", basis=PRINTED,
    ),
    "S3-043": Formula(
        "data sheet of the H100 SXM (data/hardware.csv)",
        lambda: {"memory": _of("h100-80gb", "memory") / 80, "its rate": _of("h100-80gb", "hbm") / 3000},
        "The H100's data sheet prints the claimed 80 GB but {1:.2f} times the claimed 3 TB/s, which NVIDIA announced "
        "in 2022. Neither was measured.",
        "A data sheet of the H100 SXM with 3 TB/s.", "times the claimed", claimed=1.0, within=0.1,
        confidence="medium", basis=PRINTED,
    ),
    "S4-044": Formula(
        "data sheet of the H100 SXM (data/hardware.csv)", lambda: {"dense bf16": _of("h100-80gb", "peak_bf16") / 1e3},
        "NVIDIA's data sheet of the H100 prints {0:.2f} PFLOP/s for dense bf16. Training reaches about a third of it.",
        "A precision in the document for its one petaflop.", "PFLOP/s", confidence="medium", basis=PRINTED,
    ),
    "S4-078": Formula(
        "Chinchilla's 1.4e12 tokens over its 70e9 parameters (Hoffmann et al. 2022; labindex.ai)",
        lambda: {"tokens per parameter, and trillions of them": (1.4e12 / 70e9, 1.4)},
        "Chinchilla itself has 70 billion parameters and 1.4 trillion tokens, as a page on the paper prints. That is "
        "{0:.0f} tokens per parameter.",
        "Another ratio in the Chinchilla paper.", claimed=(20.0, 1.4), within=0.2, confidence="medium", basis=PRINTED,
    ),
    "S4-079": Formula(
        "15e12 * 4 bytes", lambda: {"packed": 15e12 * 4 / 1e12},
        "15 trillion tokens of 4 bytes take {0:.0f} TB (computed).", "Another width of a token than 4 bytes.", "TB",
    ),
}  # fmt: skip

"""Rules over prices, the whitepaper's table of costs, and what runs and clusters take."""

from __future__ import annotations

import datetime
import math

from tq.book.claims import ledger
from tq.book.claims.formulas import NF4_DQ, STORED, Figure, Formula, Free, RangeFormula, gigabytes
from tq.book.claims.ledger import NOT_CHECKABLE, PRINTED, Claim, Finding, Results, Rule, found, table
from tq.book.claims.words import Check, compare, in_part
from tq.systems import Transformer, hardware, lora, offload

CHAPTER = "cost-structure"
Ends = tuple[float, float]
SXM_HZ = 1.98e9  # boost clock of an H100 SXM, the highest
WEEKS = 13.0  # from which on one says months


def _pair(results: Results, key: str) -> Ends:
    return results(CHAPTER, f"{key}/low"), results(CHAPTER, f"{key}/high")


def _meet(what: str, a: Ends, b: Ends, unit: str = "") -> Check:
    """Whether two ranges overlap, which makes a claim hold in part."""
    text = f"{what} {a[0]:,.4g} to {a[1]:,.4g}{f' {unit}' if unit else ''}, needed some of {b[0]:,.4g} to {b[1]:,.4g}"
    return Check(text, a[0] <= b[1] and b[0] <= a[1], True)


def _usd(value: float) -> str:
    """Dollars as one says them."""
    return f"${value / 1e6:,.3g}M" if value >= 1e6 else f"${value / 1e3:,.3g}K"


def _millions(claim: Claim) -> Ends:
    """The bounds of the claimed sum in millions of dollars."""
    scale = {"$M": 1.0, "$B": 1e3, "$": 1e-6}[claim.unit]
    least, most = claim.bounds()
    return least * scale, most * scale


# --- prices ---------------------------------------------------------------------------------------------------


def _snapshot() -> str:
    """The months in which the offers of `data/prices.csv` were read down."""
    days = sorted(row["date"] for row in table("prices.csv"))
    if not days:
        return "a later month"
    first, last = (datetime.date.fromisoformat(day) for day in (days[0], days[-1]))
    until = f"{last:%B %Y}"
    since = "" if f"{first:%B %Y}" == until else f"{first:%B} to " if first.year == last.year else f"{first:%B %Y} to "
    return f"{since}{until}"


def _price(column: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """The cheapest and the dearest dated offer are the ends of the claimed range; in part where the ranges meet."""
        low, high = _pair(results, f"price/{column}")
        (least, most), (below, above) = claim.ends(), claim.within()
        checks = (
            compare("cheapest offer", low, least * (1 - below), least * (1 + below), "USD"),
            compare("dearest offer", high, most * (1 - above), most * (1 + above), "USD"),
            _meet("offers", (low, high), claim.bounds(), "USD"),
        )
        number = results(CHAPTER, f"price/{column}/offers")
        text = f"Dated offers ask {low:.2f} to {high:.2f} dollars an hour ({number:.0f} of them, {_snapshot()}). "
        return found(claim, checks, text + "Prices of March 2026, which the document names, were not found.", change,
                     "medium", basis=PRINTED)  # fmt: skip

    return rule


def _spot(gpu: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """A named and dated offer at the claimed price or below. None decides nothing: prices of that month were not
        found."""
        lowest = results(CHAPTER, f"price/{gpu}/spot/low")
        least, most = claim.bounds()
        text = f"The lowest named and dated spot offer asks {lowest:.2f} dollars an hour ({_snapshot()})"
        if lowest > most:
            return Finding(NOT_CHECKABLE, f"{text}; offers of March 2026, which the document names, were not found.",
                           change)  # fmt: skip
        return found(claim, (compare("lowest offer", lowest, most=most, unit="USD"),), f"{text}.", change, "low",
                     basis=PRINTED)  # fmt: skip

    return rule


# --- the whitepaper's table of costs --------------------------------------------------------------------------

TOKENS = {
    "20-a-parameter": "20 tokens a parameter",
    "gpt-3": "GPT-3's tokens",
    "llama-2": "Llama 2's tokens",
    "llama-3.1-405b": "Llama 3.1 405B",
}


def _cost(row: str, runs: tuple[str, ...], change: str, asked: str = "on-demand/h100", own: bool = True) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Every named run costs what is claimed at the median dated price, and the row's dollars over its own GPU-hours
        are prices of the whitepaper's own list; in part where one does or a cost meets the range."""
        prices = [results(CHAPTER, f"{asked}/{end}") for end in ("low", "mid", "high")]
        checks, said = [], []
        for run in runs:
            low, mid, high = (results(CHAPTER, f"needed/{row}/{run}/{end}") for end in ("low", "mid", "high"))
            checks.append(compare(f"{TOKENS[run]}, median, USD", mid * prices[1], *claim.bounds()))
            checks.append(_meet(f"{TOKENS[run]}, USD", (low * prices[0], high * prices[2]), claim.bounds()))
            said.append(f"{_usd(mid * prices[1])} for {TOKENS[run]}")
        text = f"At dated prices a run costs {' and '.join(said)} in the median"
        if own:
            implied = _pair(results, f"row/{row}/implied")
            listed = ledger.claim("S0-022").number(), ledger.claim("S0-020").ends()[1]
            checks += [compare("its own dollars over its own hours", each, *listed, "USD/h") for each in implied]
            text += (
                f"; its own dollars over its own GPU-hours are {implied[0]:.2f} to {implied[1]:.2f}, where its list "
                "has "
                f"{listed[0]:.2f} to {listed[1]:.2f}"
            )
        return found(claim, checks, text + ".", change, "medium", "6 P T / (share of the peak) * price")

    return rule


def _hours(row: str, run: str, change: str, beside: str = "") -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """The row's GPU-hours overlap what the named run needs (80 % interval of published runs), as many or more where
        its GPUs are a lower bound; in part where they lie between that run and another of the size."""
        have, need = _pair(results, f"row/{row}/hours"), _pair(results, f"needed/{row}/{run}")
        text = f"It has {have[0]:,.0f} to {have[1]:,.0f} GPU-hours; {TOKENS[run]} take {need[0]:,.0f} to {need[1]:,.0f}"
        open_end = claim.quantifier == "at least"
        meets = have[0] <= need[1] and (open_end or need[0] <= have[1])
        checks = [Check(f"GPU-hours {have[0]:,.0f} to {have[1]:,.0f} are what {TOKENS[run]} take", meets)]
        if beside:
            other = _pair(results, f"needed/{row}/{beside}")
            between = min(need[0], other[0]) <= have[0] and have[1] <= max(need[1], other[1])
            checks.append(Check(f"GPU-hours lie between those and {TOKENS[beside]}", between, True))
            text += f", {TOKENS[beside]} {other[0]:,.0f} to {other[1]:,.0f}"
        text += "; its plus sign allows for more GPUs." if open_end else "."
        return found(claim, checks, text, change, "medium", "6 P T / (share of the peak)")

    return rule


# --- costs in the other documents -----------------------------------------------------------------------------


def _published(runs: tuple[str, ...], change: str, shorter: str = "") -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Every named published run costs what is claimed at the median dated price; in part where one does, or where
        a cost at some price, or that of a run of 20 tokens a parameter, meets the range."""
        least, most = _millions(claim)
        checks, said = [], []
        for run in runs:
            low, mid, high = (results(CHAPTER, f"cost/{run}/{end}") for end in ("low", "mid", "high"))
            checks.append(compare(f"{run}, median, million USD", mid, least, most))
            checks.append(_meet(f"{run}, million USD", (low, high), (least, most)))
            said.append(f"{_usd(mid * 1e6)} ({_usd(low * 1e6)} to {_usd(high * 1e6)}) for {RUNS[run]}")
        if shorter:
            hours, prices = _pair(results, f"needed/{shorter}/20-a-parameter"), _pair(results, "on-demand/h100")
            short = hours[0] * prices[0] / 1e6, hours[1] * prices[1] / 1e6
            checks.append(_meet("20 tokens a parameter, million USD", short, (least, most)))
            said.append(f"{_usd(short[0] * 1e6)} to {_usd(short[1] * 1e6)} for 20 tokens a parameter")
        return found(claim, checks, f"At dated prices of 2026: {', '.join(said)}.", change, "medium", "hours * price")

    return rule


RUNS = {
    "gpt-4": "the run that is named", "l2-7b": "Llama 2 7B", "l2-70b": "Llama 2 70B", "l31-hours-70b": "Llama 3.1 70B",
    "l31-hours-405b": "Llama 3.1 405B",
}  # fmt: skip


def billion(claim: Claim, results: Results) -> Finding:
    """The instance's GPU-hours at the median dated price, with engineering at the document's own upper end, come to
    what is claimed; in part at the dearest price."""
    mid, high = results(CHAPTER, "textbook/usd/mid"), results(CHAPTER, "textbook/usd/high")
    least, most = _millions(claim)
    checks = (
        compare("computing at the median price and 99 of engineering, million USD", mid + 99, least, most),
        in_part(compare("the same at the dearest price, million USD", high + 99, least, most)),
    )
    text = (
        f"Its 60 million H100-hours cost {mid:,.0f} million dollars at the median price and {high:,.0f} at the dearest;"
        " its own tens of millions for engineers leave it below a billion. Data are not priced."
    )
    return found(claim, checks, text, "Data or staff that cost more than the computing.", "medium", "GPUs * h * price")


def weeks(claim: Claim, results: Results) -> Finding:
    """Two weeks to a quarter, from which on one says months, at the median share of the peak; in part at the best
    tenth."""
    low, mid = (results(CHAPTER, f"textbook/weeks-on-eight-4090/{end}") for end in ("low", "mid"))
    checks = (
        compare("weeks at the median share", mid, 2.0, WEEKS),
        in_part(compare("weeks at the best tenth", low, 2.0, WEEKS)),
    )
    text = (
        f"100 billion tokens of a 7B model take {mid:.0f} weeks on eight 4090 at the share of the peak that published "
        f"runs realised in the median, {low:.0f} at the best tenth. No such run is published."
    )
    return found(claim, checks, text, "Such a run on such a workstation, timed.", "low", "6 P T / (8 m peak)")


def orders(claim: Claim, results: Results) -> Finding:
    """Operations of Llama 3.1 405B over those of GPT-3 are as many orders of magnitude as claimed."""
    orders = results(CHAPTER, "textbook/orders-gpt-3-to-405b")
    text = (
        f"From GPT-3 to Llama 3.1 405B, the largest run of 2024 with published compute, it is {orders:.1f} orders of "
        "magnitude, not three. The document's own exponents are lost."
    )
    checks = (compare("orders of magnitude", orders, *claim.bounds()),)
    return found(claim, checks, text, "A model of 2024 with published compute above 10^26.", "medium")


def _peak(gpu: str, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """The dense 16-bit rate of the data sheet in `data/hardware.csv`."""
        rate = results(CHAPTER, f"peak/{gpu}")
        text = f"Its data sheet prints {rate:g} TFLOP/s, dense, in 16 bits. Transcribed, and measured by nobody here."
        return found(claim, (compare("TFLOP/s", rate, *claim.bounds()),), text, change, "medium", basis=PRINTED)

    return rule


def days(claim: Claim, results: Results) -> Finding:
    """The operations of the same account on 25,000 A100 take 90 or 100 days at a share of the peak that published runs
    realised: in part at most, as operations and days come from one account."""
    low, high = claim.ends()
    peak = results(CHAPTER, "peak/a100-80gb") * 1e12
    share = [2.15e25 / (25_000 * peak * 86_400 * day) for day in (high, low)]
    seen = results(CHAPTER, "realised/low"), results(CHAPTER, "realised/high")
    checks = (
        Check("an account of its maker's own", False),
        *(in_part(compare("share of the peak", each, *seen)) for each in share),
    )
    text = (
        f"An estimated 2.15e25 operations take that long on 25,000 A100 at {share[0]:.0%} to {share[1]:.0%} of the "
        "peak,"
        f" and published runs realised {seen[0]:.0%} to {seen[1]:.0%}. Its maker published neither."
    )
    return found(claim, checks, text, "OpenAI's own account of that run.", "low", "FLOP / (n peak days)")


def generations(claim: Claim, results: Results) -> Finding:
    """Every step of the dense 16-bit peak from V100 to B200 lies in the claimed range."""
    ends = results(CHAPTER, "peak-step/low"), results(CHAPTER, "peak-step/high")
    named = zip(("least", "largest"), ends, strict=True)
    checks = [compare(f"{name} step", step, *claim.bounds(), "x") for name, step in named]
    text = f"Printed dense 16-bit peaks grow {ends[0]:.2f} to {ends[1]:.2f} times from V100 to A100, H100 and B200."
    return found(claim, checks, text, "Rates that are measured instead of printed.", "high", basis=PRINTED)


def lost_day(claim: Claim, results: Results) -> Finding:
    """A day of 25,000 H100 at some dated price comes to the claimed sum or more."""
    low, high = _pair(results, "textbook/lost-day")
    text = f"A day of 25,000 H100 costs {low:.1f} to {high:.1f} million dollars at dated prices."
    least = _millions(claim)[0]
    checks = compare("million USD at the lowest price", low, least), compare("at the dearest", high, least)
    change = "A cluster of its own at less than 1.7 dollars a GPU-hour."
    return found(claim, checks, text, change, "high", "GPUs * 24 * price")


def rented(claim: Claim, results: Results) -> Finding:
    """The instance's GPU-hours cost at least the claimed sum at the lowest dated price; in part at the median one."""
    low, mid = results(CHAPTER, "textbook/usd/low"), results(CHAPTER, "textbook/usd/mid")
    checks = (
        compare("million USD at the lowest price", low, _millions(claim)[0]),
        in_part(compare("at the median price", mid, _millions(claim)[0])),
    )
    text = (
        f"The document's own run, 25,000 H100 for 100 days, costs {low:,.0f} million dollars at the lowest dated price "
        f"and {mid:,.0f} at the median. The factors that it multiplies are lost."
    )
    return found(claim, checks, text, "GPUs that rent for less than 1.7 dollars an hour.", "medium", "GPUs * h * price")


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
    "S0-020": _price("h100/major", "Price lists of the large clouds of March 2026 with other ends."),
    "S0-021": _price("h100/specialised", "Price lists of the specialised clouds of March 2026."),
    "S0-022": _spot("h100", "A dated spot offer of an H100 at 0.99 dollars."),
    "S0-023": _price("a100/major", "An offer of a large cloud at 5.78 dollars an hour."),
    "S0-024": _price("a100/specialised", "Offers of an A100 in March 2026 between 1.29 and 2.06 dollars."),
    "S0-025": _spot("a100", "A dated spot offer of an 80 GB A100 at 0.74 dollars."),
    "S0-026": _cost("7b", ("20-a-parameter", "llama-2"), "A number of tokens beside the 7B row."),
    "S0-027": _hours("7b", "20-a-parameter", "A 7B run of 3 to 12 tokens a parameter in thousands.", "llama-2"),
    "S0-028": _cost("70b", ("20-a-parameter", "llama-2"), "More GPUs or weeks in the 70B row, whose dollars need "
    "them."),
    "S0-029": _hours("70b", "20-a-parameter", "A 70B run that stops at seven tokens a parameter.", "llama-2"),
    "S0-030": _cost("175b", ("gpt-3",), "Fewer GPU-hours in the 175B row, or a cost that counts all of them."),
    "S0-031": _hours("175b", "gpt-3", "Other tokens than GPT-3's in the 175B row.", "20-a-parameter"),
    "S0-032": _cost("frontier", ("llama-3.1-405b",), "A frontier run for less than $23M.", "on-demand/h200", False),
    "S0-033": _hours("frontier", "llama-3.1-405b", "A frontier run on fewer than 2,000 GPUs."),
    "S3-001": _published(("gpt-4",), "An account of that run's cost by OpenAI."),
    "S3-004": days,
    "S3-059": _published(("l2-7b",), "Tokens beside the price of a 7B run.", "7b"),
    "S3-060": _published(("l2-70b", "l31-hours-70b"), "Tokens beside the price of a 70B run."),
    "S3-061": _published(("l31-hours-405b",), "A published run above 400B for less than 45 million dollars."),
    "S4-004": billion,
    "S4-010": weeks,
    "S4-017": orders,
    "S4-030": _peak("v100-32gb", "Another rate in NVIDIA's data sheet of the V100."),
    "S4-031": _peak("a100-80gb", "Another rate in NVIDIA's data sheet of the A100."),
    "S4-036": generations,
    "S4-084": lost_day,
    "S4-095": rented,
    "S1-016": Free(
        "GPUs * 49,248 dollars with node and fabric (data/sources.csv)", over=(8, 1024), usual=128, name="GPUs",
        of=lambda gpus: gpus * 0.049248, claimed=Claim.ends, unit="million dollars", confidence="medium", see=CHAPTER,
        says="A cluster of {low:.0f} to {high:.0f} H100 costs about five million dollars; the document names neither "
        "the kind nor the number. 128 cost {0:.1f} million by a bill of materials.",
        would_change="The number of GPUs of the cluster that is meant.",
    ),
    "S3-038": Formula(
        "lanes * two operands * 4 bytes * 1.98 GHz; an H100 has 132 multiprocessors of 128 lanes",
        lambda: {
            "of one multiprocessor": 128 * 2 * 4 * SXM_HZ / 1e12, "of the whole GPU": 132 * 128 * 2 * 4 * SXM_HZ / 1e12,
        },
        "Right for one multiprocessor, {0:.2f} TB/s at the boost clock; the whole GPU has {1:.0f}. The document says "
        "of neither which it means.",
        "A statement of what the two terabytes a second belong to.", "TB/s",
    ),
    "S3-040": Formula(
        "multiprocessors * 128 bytes a clock",
        lambda: {"of an H100 (132 at 1.98 GHz)": 132 * 128 * SXM_HZ / 1e12},
        "An H100's caches of the first level deliver {0:.0f} TB/s together; 19 is the figure of the A100, {1:.1f}.",
        "A data sheet with 19 TB/s for an H100.", "TB/s",
        conditions=lambda: {"of an A100 (108 at 1.41 GHz)": 108 * 128 * 1.41e9 / 1e12},
    ),
    "S3-044": Free(
        "eight channels * 8 bytes * transfers a second", over=(1.6, 8.8), usual=4.8,
        name="giga-transfers a second from", of=lambda rate: 8 * 8 * rate, unit="GB/s", confidence="medium",
        says="Eight channels give 200 GB/s with DDR4-3200, and {0:.0f} with the DDR5-4800 of hosts of H100. A GPU "
        "reads host memory through PCIe at 63.",
        would_change="The host and the number of memory channels that are meant.",
    ),
    "S3-045": Free(
        "drives * 7.45 GB/s (data/stores.csv)", over=(1, 16), usual=1, name="drives",
        of=lambda drives: drives * _nvme(),
        unit="GB/s", confidence="medium", see="offload-and-single-gpu", basis=PRINTED,
        conditions=lambda: {"of two": 2 * _nvme()},
        says="One PCIe 4.0 drive reads {0:.2f} GB/s and two {1:.1f} by their maker's figure: ten lies between. The "
        "document names neither drive nor number.",
        would_change="The kind and number of drives that are meant.",
    ),
    "S4-005": Formula(
        "405e9 * 2 bytes", gigabytes(405e9, in_bf16=16), "405 billion weights of two bytes are {0:.0f} GB, weights "
        "alone.",
        "Another number of parameters of Llama 3.1 405B.", "GB",
    ),
    "S4-006": Formula(
        "405e9 * bits / 8", gigabytes(405e9, as_NF4_with_double_quantization=NF4_DQ),
        "405 billion weights take {0:.0f} GB in NF4 with double quantization, {1:.0f} with an fp32 scale every 128. "
        "Weights alone.",
        "A 4-bit format of 405B whose scales take more than half a bit.", "GB",
        conditions=gigabytes(405e9, with_fp32_scales_every_128=STORED),
    ),
    "S4-007": Formula(
        "126 layers * r * (d_in + d_out) over q, k, v, o", _lora_405b,
        "Adapters of rank 8 on the four products of attention of a 405B model have {0:.0f} million parameters; of rank "
        "16 {1:.0f}. The document names no rank.",
        "A rank beside the hundred million.", "million", confidence="medium",
    ),
    "S4-008": Formula(
        "8 * 80 GB", lambda: {"of eight cards": 8 * 80.0}, "Eight H100 of 80 GB have {0:.0f} GB.",
        "Cards of another memory than 80 GB.", "GB",
    ),
    "S4-009": RangeFormula(
        "7e9 * (2 + 2 + 4 + 2.06) bytes, beside 8 * 24 GB",
        lambda: {"states with 8-bit Adam": 7 * 10.06},
        "Fits: eight cards of 24 GB hold 192; weights, gradients, a master copy and 8-bit moments of 7B take {0:.0f}, "
        "and fp32 moments {1:.0f}. Checkpointed activations come beside.",
        "Activations of more than 120 GB over eight cards.", "GB", conditions=lambda: {"with fp32 moments": 7 * 16.0},
        claimed=(0.0, 192.0), within=0.0, confidence="medium",
    ),
    "S4-012": Formula(
        "log10 of the ratio of two of its instances",
        lambda: {
            "of operations, the first over the third": math.log10(6.67e25 / (6 * 7e9 * 1e11)),
            "of dollars, the first over the second (8 H100 for a day)": math.log10(1e9 / (8 * 24 * 3.99)),
        },
        "In part: the dollars of the largest and the smallest instance are {1:.1f} orders apart, the operations of "
        "pretraining {0:.1f}. The document's own numbers of operations are lost.",
        "An undamaged copy, with the operations of the three instances.", "orders", confidence="low",
    ),
    "S4-033": Formula(
        "data sheet of the H100 SXM (data/hardware.csv; fp8 twice the rate of bf16)",
        lambda: {"dense, bf16 and fp8": (_of("h100-80gb", "peak_bf16"), 2 * _of("h100-80gb", "peak_bf16"))},
        "The data sheet prints {0:.1f} TFLOP/s for bf16 and twice that for fp8, dense. Printed, not measured here.",
        "Another rate in NVIDIA's data sheet of the H100.", "TFLOP/s", claimed=(990.0, 1979.0), within=0.2,
        confidence="medium", basis=PRINTED,
    ),
    "S4-034": Formula(
        "data sheet of the H200 (data/hardware.csv)", lambda: {"memory": _of("h200-141gb", "memory")},
        "The data sheet prints {0:.0f} GB of HBM3e. Printed, not measured here.",
        "Another memory in NVIDIA's data sheet of the H200.", "GB", confidence="medium", basis=PRINTED,
    ),
    "S4-042": RangeFormula(
        "data sheet of the H100 SXM (data/hardware.csv)", lambda: {"memory rate": _of("h100-80gb", "hbm") / 1e3},
        "The data sheet prints {0:.2f} TB/s for the SXM part. Printed, not measured here.",
        "An H100 whose memory is slower than 2.7 TB/s, as the PCIe card's is.", "TB/s", confidence="medium",
        basis=PRINTED,
    ),
    "S3-043": Formula(
        "data sheet of the H100 SXM (data/hardware.csv)",
        lambda: {"memory": _of("h100-80gb", "memory") / 80, "its rate": _of("h100-80gb", "hbm") / 3000},
        "80 GB agree; the data sheet prints 3.35 TB/s, {1:.2f} times the claimed three. Printed, not measured here.",
        "A first data sheet of the SXM part with three terabytes a second.", "of the claimed", claimed=1.0, within=0.1,
        confidence="medium", basis=PRINTED,
    ),
    "S4-044": Formula(
        "data sheet of the H100 SXM (data/hardware.csv)",
        lambda: {"dense bf16": _of("h100-80gb", "peak_bf16") / 1e3},
        "The data sheet prints {0:.2f} PFLOP/s for dense bf16. Printed; training realises a third of it.",
        "A precision beside the one petaflop.", "PFLOP/s", confidence="medium", basis=PRINTED,
    ),
    "S4-078": Formula(
        "20 * 70e9", lambda: {"of 70B": 20 * 70e9 / 1e12}, "Twenty tokens for each of 70 billion parameters are "
        "{0:.1f} "
        "trillion; the ratio itself is Chinchilla's.", "Another ratio in the Chinchilla paper.", "trillion tokens",
        claimed=1.4,
    ),
    "S4-079": Formula(
        "15e12 * 4 bytes", lambda: {"packed": 15e12 * 4 / 1e12}, "15 trillion tokens of four bytes are {0:.0f} TB.",
        "Another width of a stored token than four bytes.", "TB",
    ),
}  # fmt: skip

"""Rules over prices, the whitepaper's table of costs, and what runs and clusters take."""

from __future__ import annotations

import datetime
import math
import re

from tq.book.claims import ledger
from tq.book.claims.formulas import (
    NF4_DQ,
    STORED,
    TIGHT,
    WEIGHTS_ALONE,
    Figure,
    Formula,
    RangeFormula,
    at_least,
    gigabytes,
)
from tq.book.claims.ledger import NOT_CHECKABLE, Claim, Finding, Results, Rule, table, verdict_for
from tq.systems import Transformer, lora, offload

CHAPTER = "cost-structure"
SNAPSHOT = "Dated prices of the month that the document names."
#: data/sources.csv, cost-175b-lower and cost-175b-upper
ORIGIN = "Its ends are those of an announcement of 2022 about a smaller model and of an estimate of 2020 on V100s"
Ends = tuple[float, float]


def _pair(results: Results, key: str) -> Ends:
    return results(CHAPTER, f"{key}/low"), results(CHAPTER, f"{key}/high")


def _meet(a: Ends, b: Ends) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


# --- prices ---------------------------------------------------------------------------------------------------


def _snapshot() -> str:
    """The snapshot, with the months in which its offers were read down, as `data/prices.csv` has them."""
    days = sorted(row["date"] for row in table("prices.csv"))
    if not days:
        return "the snapshot"
    first, last = (datetime.date.fromisoformat(day) for day in (days[0], days[-1]))
    until = f"{last:%B %Y}"
    since = "" if f"{first:%B %Y}" == until else f"{first:%B} to " if first.year == last.year else f"{first:%B %Y} to "
    return f"the snapshot ({since}{until})"


def _price(column: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Both ends within a tenth of the cheapest and the dearest offer; in part where the ranges meet."""
        claimed, found = claim.ends(), _pair(results, f"price/{column}")
        near = all(abs(a / b - 1) <= 0.1 for a, b in zip(found, claimed, strict=True))
        text = (
            f"offers of {_snapshot()} ask {found[0]:.2f} to {found[1]:.2f} USD"
            f" ({results(CHAPTER, f'price/{column}/offers'):.0f} of them); the document is of March 2026"
        )
        return Finding(verdict_for(near, _meet(claimed, found)), text, SNAPSHOT, "medium")

    return rule


def spot_h100(claim: Claim, results: Results) -> Finding:
    """A named and dated offer at the floor or within a tenth of it; in part where only a nameless quote reaches it."""
    floor, lowest, quote = claim.number(), results(CHAPTER, "price/h100/spot/low"), results(CHAPTER, "quote/h100-spot")
    text = (
        f"the lowest named and dated offer that was found asks {lowest:.2f} USD; quotes without the name of a "
        f"provider go down to {quote:.2f}"
    )
    return Finding(verdict_for(lowest <= 1.1 * floor, quote <= floor), text, SNAPSHOT, "low")


def spot_a100(claim: Claim, results: Results) -> Finding:
    """Prices of that month were not found; one near the floor later would make it credible, in part within 30 %."""
    lowest = results(CHAPTER, "price/a100/spot/low")
    text = f"no dated offer at this price was found; the lowest of {_snapshot()} asks {lowest:.2f} USD"
    if lowest > 1.3 * claim.number():
        return Finding(NOT_CHECKABLE, text, SNAPSHOT)
    text = f"an offer of {_snapshot()} asks {lowest:.2f} USD"
    return Finding(verdict_for(lowest <= 1.1 * claim.number(), True), text, SNAPSHOT, "low")


# --- the whitepaper's table of costs --------------------------------------------------------------------------


def _words(label: str) -> str:
    return {
        "20-a-parameter": "20 tokens a parameter",
        "gpt-3": "the tokens of GPT-3",
        "llama-2": "those of Llama 2",
    }.get(label, "Llama 3.1 405B")


def _row(row: str, needs: tuple[str, ...], listed: str = "", note: str = "") -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Dollars over the row's own GPU-hours: both ends among the prices that the whitepaper lists for the GPU, in
        part where one is, or where the dollars meet what a run of that size needs at the prices of the snapshot. It
        lists none for an H200: those of the snapshot."""
        implied = _pair(results, f"row/{row}/implied")
        lowest, highest = ledger.claim("S0-022"), ledger.claim("S0-020")
        prices = _pair(results, listed) if listed else (lowest.number(), highest.ends()[1])
        good = [prices[0] <= price <= prices[1] for price in implied]
        text = (
            f"its own GPU-hours make it {implied[0]:.2f} to {implied[1]:.2f} USD an hour, where "
            f"{'the snapshot asks' if listed else 'its price list has'} {prices[0]:.2f} to {prices[1]:.2f}"
        )
        asked = _pair(results, listed or "on-demand/h100")
        hours = {label: _pair(results, f"needed/{row}/{label}") for label in needs}
        usd = {label: (low * asked[0], high * asked[1]) for label, (low, high) in hours.items()}
        meets = [label for label, cost in usd.items() if _meet(claim.ends(), cost)]
        text += "; at the hours that such runs need it costs "
        text += " and ".join(f"{c[0] / 1e6:.3g} to {c[1] / 1e6:.3g} million for {_words(n)}" for n, c in usd.items())
        text += f". {note}" if note else ""
        change = (
            "More GPUs or months than the row names." if implied[1] > prices[1] else "Fewer GPU-hours, or its base."
        )
        return Finding(verdict_for(all(good), any(good) or bool(meets)), text, change, "high", "USD / (GPUs * hours)")

    return rule


def _duration(row: str, needs: tuple[str, ...], named: str = "") -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """The row's GPU-hours between what the shortest and the longest run of that size need (80 % intervals of
        published runs), and what the named model needs; in part where only the first holds, or they overlap."""
        have = _pair(results, f"row/{row}/hours")
        need = {label: _pair(results, f"needed/{row}/{label}") for label in needs}
        span = min(n[0] for n in need.values()), max(n[1] for n in need.values())
        between = span[0] <= have[0] and have[1] <= span[1]
        model = not named or _meet(have, need[named])
        text = f"it has {have[0]:,.0f} to {have[1]:,.0f} GPU-hours; needed are "
        text += " and ".join(f"{low:,.0f} to {high:,.0f} for {_words(label)}" for label, (low, high) in need.items())
        return Finding(
            verdict_for(between and model, _meet(have, span)),
            text,
            "A number of tokens with the row.",
            "medium",
            "6 P T",
        )

    return rule


# --- costs in the other documents -----------------------------------------------------------------------------


def _published(runs: tuple[str, ...], shorter: str = "") -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """The hours of every named published run at the prices of the snapshot meet the claimed range; in part if some
        do or miss it by less than half, or if it lies between a run of 20 tokens a parameter and the published ones."""
        low, high = ((1e6 if claim.unit.startswith("$M") else 1.0) * end for end in claim.ends())
        claimed = (low, float("inf") if claim.value.endswith("+") else high)
        cost = {run: tuple(1e6 * usd for usd in _pair(results, f"cost/{run}")) for run in runs}
        good = [_meet(claimed, (low, high)) for low, high in cost.values()]
        text = "at the prices of the snapshot " + ", ".join(
            f"{run} costs {low / 1e6:.3g} to {high / 1e6:.3g} million" for run, (low, high) in cost.items()
        )
        part = any(good) or any(_meet(claimed, (low / 1.5, high * 1.5)) for low, high in cost.values())
        if shorter:
            hours, prices = _pair(results, f"needed/{shorter}/20-a-parameter"), _pair(results, "on-demand/h100")
            least = hours[0] * prices[0]
            part = part or least <= claimed[0] <= claimed[1] <= max(high for _, high in cost.values())
            text += f", and twenty tokens a parameter from {least / 1e6:.2g} million"
        return Finding(verdict_for(all(good), part), text, "Prices or hours of the run that is meant.", "medium")

    return rule


def _from_million(claim: Claim) -> float:
    return claim.ends()[0] / (1e6 if re.search(r"\d[KMB]", claim.value) else 1.0)


def gpu_hours(claim: Claim, results: Results) -> Finding:
    """A product."""
    found = results(CHAPTER, "textbook/gpu-hours")
    text = f"25,000 GPUs for 100 days are {found / 1e6:.0f} million GPU-hours"
    near = abs(found / claim.ends()[0] - 1)
    return Finding(verdict_for(near <= 0.05, near <= 0.25), text, "Other counts.", "high", "25,000 * 100 * 24")


def lost_exponent(claim: Claim, results: Results) -> Finding:
    """10^26 operations, as the lost exponent is read: inside the interval of published shares of the peak, or of the
    same order as its middle."""
    low, mid, high = (results(CHAPTER, f"textbook/flops/{end}") for end in ("low", "mid", "high"))
    text = f"read as 10^26, the exponent being lost: 60 million H100-hours realise {low:.2g} to {high:.2g} operations"
    inside, order = low <= 1e26 <= high, 10**25.5 <= mid <= 10**26.5
    return Finding(verdict_for(inside, order), text, "An undamaged copy of the document.", "low")


def billion(claim: Claim, results: Results) -> Finding:
    """Eight tenths of a billion at the median price; in part at the dearest. Computing alone."""
    mid, high = results(CHAPTER, "textbook/usd/mid"), results(CHAPTER, "textbook/usd/high")
    text = (
        f"60 million H100-hours are {mid:,.0f} million USD at the median price and {high:,.0f} at the highest; what "
        "besides computing is counted the document does not say"
    )
    return Finding(verdict_for(mid >= 800, high >= 800), text, "An account of the other costs.", "medium")


def weeks(claim: Claim, results: Results) -> Finding:
    """Two months at the median share of the peak; in part a quarter at the best one."""
    low, mid = (
        results(CHAPTER, "textbook/weeks-on-eight-4090/low"),
        results(CHAPTER, "textbook/weeks-on-eight-4090/mid"),
    )
    text = (
        f"100 billion tokens take {mid:.0f} weeks at the median share of the peak that published runs realised, "
        f"{low:.0f} at the best tenth; no published run is on such a workstation"
    )
    return Finding(verdict_for(mid <= 8.7, low <= 13), text, "Such a run, timed.", "low", "6 P T / (8 m peak)")


def orders(claim: Claim, results: Results) -> Finding:
    """Within .3 of an order; in part within .7."""
    found = results(CHAPTER, "textbook/orders-gpt-3-to-405b")
    off = abs(found - claim.number())
    text = f"from GPT-3 to Llama 3.1 405B it is {found:.1f} orders of magnitude; the document's own exponents are lost"
    return Finding(verdict_for(off <= 0.3, off <= 0.7), text, "A later model whose compute is published.", "medium")


def _peak(gpu: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """The data sheet's figure, to half a per cent; a tenth is agreement in part."""
        found = results(CHAPTER, f"peak/{gpu}")
        off = abs(found / claim.number() - 1)
        text = f"its data sheet has {found:g} TFLOP/s, dense (transcribed, not read again)"
        return Finding(verdict_for(off <= 0.005, off <= 0.1), text, "Another part of that name.", "medium")

    return rule


def days(claim: Claim, results: Results) -> Finding:
    """2.15e25 operations on 25,000 A100: in part where that takes the claimed days at shares of the peak within the
    80 % interval of published runs. Never more: the operations are estimated by the account that has the days."""
    low, high = claim.ends()
    peak = results(CHAPTER, "peak/a100-80gb") * 1e12
    share = [2.15e25 / (25_000 * peak * 86_400 * day) for day in (high, low)]
    seen = results(CHAPTER, "realised/low"), results(CHAPTER, "realised/high")
    text = (
        "an estimated 2.15e25 operations (data/sources.csv, gpt4-gpus) on 25,000 A100 take as long at "
        f"{share[0]:.0%} to {share[1]:.0%} of the peak; published runs realised {seen[0]:.0%} to {seen[1]:.0%}. "
        "One account agrees with itself so: its maker published neither figure"
    )
    inside = all(seen[0] <= each <= seen[1] for each in share)
    return Finding(verdict_for(False, inside), text, "Its maker's own account.", "low", "FLOP / (n peak days)")


def generations(claim: Claim, results: Results) -> Finding:
    """Every step from V100 to B200 in the range, to a tenth; in part some end."""
    low, high = claim.ends()
    found = results(CHAPTER, "peak-step/low"), results(CHAPTER, "peak-step/high")
    good = [0.9 * low <= step <= 1.1 * high for step in found]
    text = f"dense 16-bit peaks grow {found[0]:.2f} to {found[1]:.2f} times from V100 to A100, H100 and B200"
    return Finding(verdict_for(all(good), any(good)), text, "Rates that are measured, not printed.", "high")


def lost_day(claim: Claim, results: Results) -> Finding:
    """At the lowest price of the snapshot; in part at the highest."""
    low, high, claimed = (*_pair(results, "textbook/lost-day"), _from_million(claim))
    text = f"a day of 25,000 H100 is {low:.1f} to {high:.1f} million USD at the prices of the snapshot"
    return Finding(verdict_for(low >= claimed, high >= claimed), text, "Own GPUs, which cost less.", "high")


def per_operation(claim: Claim, results: Results) -> Finding:
    """10^26 operations, as the lost figures are read, at the cheapest end; in part at the dearest."""
    low, high, claimed = (*_pair(results, "textbook/usd-for-1e26"), _from_million(claim))
    text = (
        f"10^26 operations, as the lost exponents are read, cost {low:,.0f} to {high:,.0f} million USD at the "
        "snapshot's prices and the shares of the peak that published runs realised"
    )
    return Finding(verdict_for(low >= claimed, high >= claimed), text, "An undamaged copy of the document.", "low")


# --- over formulas --------------------------------------------------------------------------------------------


def _nvme() -> float:
    """GB/s that a PCIe 4.0 drive reads, as its maker prints it in data/stores.csv."""
    return float(offload.place("nvme-gen4").read_bytes_per_s) / 1e9


def _lora_405b() -> dict[str, Figure]:
    """Millions of adapter parameters on q, k, v and o of Llama 3.1 405B."""
    shape = Transformer.preset("llama3-405b")
    return {f"at rank {rank}": lora.lora_parameters(shape, rank) / 1e6 for rank in (8, 16, 64)}


RULES: dict[str, Rule] = {
    "S0-020": _price("h100/major"),
    "S0-021": _price("h100/specialised"),
    "S0-022": spot_h100,
    "S0-023": _price("a100/major"),
    "S0-024": _price("a100/specialised"),
    "S0-025": spot_a100,
    "S0-026": _row("7b", ("20-a-parameter", "llama-2")),
    "S0-027": _duration("7b", ("20-a-parameter", "llama-2")),
    "S0-028": _row("70b", ("20-a-parameter", "llama-2")),
    "S0-029": _duration("70b", ("20-a-parameter", "llama-2")),
    "S0-030": _row("175b", ("gpt-3", "20-a-parameter"), note=ORIGIN),
    "S0-031": _duration("175b", ("20-a-parameter", "gpt-3"), named="gpt-3"),
    "S0-032": _row("frontier", ("llama-3.1-405b",), listed="on-demand/h200", note="Its plus signs allow for more GPUs"),
    "S0-033": _duration("frontier", ("llama-3.1-405b",)),
    "S3-001": _published(("gpt-4",)),
    "S3-004": days,
    "S3-059": _published(("l2-7b",), shorter="7b"),
    "S3-060": _published(("l2-70b", "l31-hours-70b")),
    "S3-061": _published(("l31-hours-405b",)),
    "S4-002": gpu_hours,
    "S4-003": lost_exponent,
    "S4-004": billion,
    "S4-010": weeks,
    "S4-017": orders,
    "S4-030": _peak("v100-32gb"),
    "S4-031": _peak("a100-80gb"),
    "S4-036": generations,
    "S4-084": lost_day,
    "S4-095": per_operation,
    "S1-016": Formula(
        "GPUs * dollars", lambda: {"for 128 at 40,000 dollars": 128 * 0.04, "for 128 at 30,000": 128 * 0.03},
        "million dollars", confidence="medium", see="cost-structure",
        note="What an H100 costs with its share of node and network is assumed.",
        would_change="A quotation for a cluster.",
    ),
    "S3-038": Formula(
        "lanes * operands * 4 bytes * 1.755 GHz: an H100 has 132 multiprocessors of 128 lanes",
        lambda: {
            "for one multiprocessor that reads two operands": 128 * 2 * 4 * 1.755e9 / 1e12,
            "for one that reads three": 128 * 3 * 4 * 1.755e9 / 1e12,
            "for the whole GPU": 132 * 128 * 3 * 4 * 1.755e9 / 1e12,
        }, "TB/s", note="The claim does not say of what.",
    ),
    "S3-040": Formula(
        "multiprocessors * 128 bytes a clock",
        lambda: {
            "for an A100 (108 at 1.41 GHz)": 108 * 128 * 1.41e9 / 1e12,
            "for the H100 that it is about (132 at 1.755 GHz)": 132 * 128 * 1.755e9 / 1e12,
        }, "TB/s",
    ),
    "S3-044": Formula(
        "channels * 8 bytes * transfers a second",
        lambda: {
            "for eight channels of DDR4-3200": 8 * 8 * 3.2, "for eight of DDR5-4800": 8 * 8 * 4.8,
            "for twelve of DDR5-4800": 12 * 8 * 4.8, "as a GPU sees it through PCIe 5.0 (data/sources.csv)": 64.0,
        }, "GB/s", would_change="The machine that is meant.", confidence="medium",
    ),
    "S3-045": RangeFormula(
        "drives * GB/s of data/stores.csv",
        lambda: {"of one PCIe 4.0 drive": _nvme(), "of two that are striped": 2 * _nvme()}, "GB/s", 0.0,
        claimed=at_least, note="Sequential reads as the maker prints them, data/stores.csv.",
        see="offload-and-single-gpu",
    ),
    "S4-005": Formula("405e9 * 2 bytes", gigabytes(405e9, in_bf16=16), "GB", TIGHT, note=WEIGHTS_ALONE),
    "S4-006": Formula(
        "405e9 * bits / 8",
        gigabytes(
            405e9, for_the_codes_alone=4, as_NF4_with_double_quantization=NF4_DQ, with_fp32_scales_every_128=STORED
        ),
        "GB", note=WEIGHTS_ALONE,
    ),
    "S4-007": Formula(
        "126 layers * r * (d_in + d_out) over q, k, v, o", _lora_405b, "million",
        would_change="Adapters on other matrices than the four of attention.", confidence="medium",
    ),
    "S4-008": Formula("8 * 80", lambda: {"for eight cards of 80 GB": 8 * 80.0}, "GB", TIGHT),
    "S4-009": Formula(
        "8 * 24", lambda: {"for eight cards of 24 GB": 8 * 24.0}, "GB", TIGHT,
        note=f"A 7B model's states take {7 * 16} GB at 16 bytes a parameter, before activations.",
    ),
    "S4-012": Formula(
        "log10 of a quotient of 25,000 GPUs for 100 days (read as 1e26 operations), hours on 8 GPUs, and 7B "
        "parameters with 100 billion tokens on 8 cards",
        lambda: {
            "in GPU-hours, if the second instance takes three hours": math.log10(25_000 * 2400 / (8 * 3)),
            "in GPU-hours, if it takes a day": math.log10(25_000 * 2400 / (8 * 24)),
            "in operations, between the first and the third": math.log10(1e26 / (6 * 7e9 * 1e11)),
            "in GPUs": math.log10(25_000 / 8),
        }, "orders", note="The document's own exponents are lost.", confidence="medium",
    ),
    "S4-078": Formula(
        "20 * 70e9", lambda: {"for 70B parameters": 20 * 70e9 / 1e12}, "trillion tokens", TIGHT, claimed=1.4
    ),
    "S4-079": Formula("15e12 * 4 bytes", lambda: {"at 4 bytes a token": 15e12 * 4 / 1e12}, "TB", TIGHT),
}  # fmt: skip

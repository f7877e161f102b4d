"""HTML of the page's calculators: forms that `calculators.js` brings to life, and tables that need no script.

Fields, ranges and the tables' numbers come from `tq.economics.calculator`, the distortions from `tq.quant`: nothing is
typed twice. The page carries them as JSON, as a page opened from a disk may fetch nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from typing import Any, NamedTuple

from tq.economics import calculator, prices, savings, scenarios
from tq.quant.codebook import distortion
from tq.systems import Transformer

TITLES = {
    "savings": "What would compression save me",
    "memory": "Memory and the largest batch",
    "codec": "Bits, bytes and distortion",
}


class Shown(NamedTuple):
    """A result: what it is called, how it is written (`shown` here and in calculators.js), and results beside it."""

    key: str
    words: str
    form: str
    beside: str = ""

    @property
    def others(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.beside)


RESULTS = {  # calculator -> its results in the order of the page
    "savings": (
        Shown("pays", "Does it pay", "pays"),
        Shown("chance", "Chance that it saves anything", "percent"),
        Shown("saving", "Saving", "percent", "median {saving_median}; 80 %: {saving_low} to {saving_high}"),
        Shown("saved_usd", "Saved on the run", "usd", "80 %: {saved_usd_low} to {saved_usd_high}"),
        Shown("plain_usd", "Cost of the run", "usd", "with codec {coded_usd}"),
        Shown("plain_hours", "Run, hours", "count", "with codec {coded_hours}"),
        Shown("plain_s", "Step, s", "number", "with codec {coded_s}"),
        Shown("exchange_s", "Gradient sync, s", "number", "with codec {coded_exchange_s}"),
        Shown("share", "Gradient sync not overlapped, share of the step", "percent"),
        Shown("codec_s", "Codec, s", "number"),
        Shown("ratio", "Compression ratio of the gradients", "fixed"),
        Shown("breakeven_gbit", "Break-even link, Gbit/s per GPU (pays below)", "number"),
        Shown("breakeven_codec_g", "Break-even codec, billion elements/s (pays above)", "number"),
    ),
    "memory": (
        Shown("parameters_b", "Parameters, billion", "number"),
        Shown("weights_gib", "Weights, GiB", "fixed"),
        Shown("gradients_gib", "Gradients, GiB", "fixed"),
        Shown("states_gib", "Optimizer states, GiB", "fixed"),
        Shown("activations_gib", "Activations, GiB", "fixed", "with codec {coded_activations_gib}"),
        Shown("working_gib", "Working space, GiB", "fixed", "with codec {coded_working_gib}"),
        Shown("total_gib", "Total, GiB", "fixed", "with codec {coded_total_gib}"),
        Shown("largest_batch", "Largest micro-batch, sequences", "count", "with codec {coded_largest_batch}"),
    ),
    "codec": (
        Shown("bits_per_element", "Stored bits per element", "number"),
        Shown("bytes", "Stored bytes", "count"),
        Shown("ratio_fp32", "Ratio against fp32", "fixed"),
        Shown("ratio_bf16", "Ratio against bf16", "fixed"),
        Shown("nmse", "Error, smallest (NMSE)", "number"),
        Shown("nmse_unbiased", "Error, unbiased scale (NMSE)", "number"),
        Shown("nmse_floor", "No quantizer is below", "number"),
        Shown("snr_db", "Signal over error, dB", "number"),
    ),
}


def distortions() -> dict[int, float]:
    """{bits: D(bits)} of the Lloyd-Max quantizer of N(0, 1)."""
    return {bits: float(distortion(bits)) for bits in range(1, 9)}


def _jobs() -> dict[str, dict[str, float]]:
    """Whole jobs of the savings calculator; each sets every field."""
    sizes = {f"{name.upper()} on {scenarios.case(name).layout.gpus:,} H100": name for name in ("7b", "175b", "405b")}
    changed: dict[str, dict[str, float]] = {
        "The reference job: 70B on 256 H100, 400 Gbit/s": {},
        "The same on Ethernet of 100 Gbit/s": {"link_gbit": 100.0},
        "The same on Ethernet of 25 Gbit/s": {"link_gbit": 25.0},
        "The same with fp32 gradients": {"base_bits": 32.0},
        "The same without ZeRO, both phases quantized": {"zero": 0.0},
        "The whitepaper's premises: fp32, no ZeRO": {"base_bits": 32.0, "zero": 0.0},
        "The same without gradient accumulation": {"overlap": 1.0},
        **{label: scenarios.fields(name) for label, name in sizes.items()},
    }
    return {label: savings.reference(**fields) for label, fields in changed.items()}


def presets() -> dict[str, dict[str, dict[str, float]]]:
    """calculator -> {label: the fields that it sets}."""
    models = ("llama2-7b", "llama2-13b", "llama2-70b", "gpt3-175b", "llama3-405b")
    shapes = {name: Transformer.preset(name) for name in models}
    names = ("layers", "hidden", "heads", "seq", "vocab")
    memory = {name: {each: float(getattr(shape, each)) for each in names} for name, shape in shapes.items()}
    return {"savings": _jobs(), "memory": memory, "codec": {}}


def data() -> dict[str, Any]:
    """What `calculators.js` reads from the page."""
    fields = {name: [asdict(field) for field in each] for name, each in calculator.FIELDS.items()}
    return {"fields": fields, "distortion": distortions(), "presets": presets()}


def run(name: str, case: calculator.Case) -> calculator.Result:
    """A calculator by its name."""
    if name == "codec":
        return calculator.codec(case, distortions())
    return {"savings": calculator.savings, "memory": calculator.memory}[name](case)


# --- HTML -----------------------------------------------------------------------------------------------------


def shown(value: float | None, form: str) -> str:
    """A result as text, as `calculators.js` writes it."""
    if value is None:
        return "none"
    if form == "percent":
        return f"{100 * value:.1f} %".replace("-", "−")
    if form == "pays":
        return "yes" if value > 0 else "no" if value < 0 else "uncertain"
    if form == "usd":
        return f"{'−' if value < 0 else ''}${abs(value):,.0f}"
    if form == "count":
        return f"{value:,.0f}"
    if form == "fixed":  # halves go up, as in the script
        return str(Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP))
    return f"{value:.4g}"


def _field(field: calculator.Field) -> str:
    unit = f" <small>{escape(field.unit)}</small>" if field.unit else ""
    if field.choices:
        options = "".join(
            f'<option value="{value:g}"{" selected" if value == field.default else ""}>{escape(words)}</option>'
            for value, words in field.choices
        )
        return f'<label><span>{escape(field.label)}{unit}</span><select name="{field.name}">{options}</select></label>'
    limits = f'min="{field.low:.17g}" max="{field.high:.17g}" step="{1 if field.whole else "any"}"'
    value = f'value="{field.default:.17g}" inputmode="decimal" autocomplete="off"'
    words = f"<span>{escape(field.label)}{unit}</span>"
    return f'<label>{words}<input type="number" name="{field.name}" {value} {limits}></label>'


def _result(result: Shown, first: bool) -> str:
    """Read out when it changes is the first result alone; the others are there to be looked up."""

    def output(key: str) -> str:
        live = "polite" if first and key == result.key else "off"
        return f'<output data-key="{key}" data-form="{result.form}" aria-live="{live}"></output>'

    beside = re.sub(r"{(\w+)}", lambda match: output(match[1]), result.beside)
    beside = f" <small>{beside}</small>" if beside else ""
    return f"<div><dt>{escape(result.words)}</dt><dd>{output(result.key)}{beside}</dd></div>"


def _inputs(name: str) -> str:
    """The fields of a form, those of a group folded."""
    fields = calculator.FIELDS[name]
    inputs = [_field(field) for field in fields if not field.group]
    known = presets()[name]
    if known:
        options = "".join(f'<option value="{escape(each)}">{escape(each)}</option>' for each in known)
        what = "Take the job" if name == "savings" else "Take the model"
        select = f'<select name="preset"><option value="">your own fields</option>{options}</select>'
        inputs.insert(0, f"<label><span>{what}</span>{select}</label>")
    text = f'<div class="tq-fields">{"".join(inputs)}</div>'
    for group in dict.fromkeys(field.group for field in fields if field.group):
        folded = "".join(_field(field) for field in fields if field.group == group)
        text += f'<details><summary>{escape(group)}</summary><div class="tq-fields">{folded}</div></details>'
    return text


def form(name: str) -> str:
    """The form of a calculator; hidden until the script shows it."""
    results = "".join(_result(result, first=i == 0) for i, result in enumerate(RESULTS[name]))
    share = '<label><span>Link to this case</span><input type="text" name="link" readonly></label>'
    figure = '<div class="tq-plot"></div>' if name == "savings" else ""
    return (
        f'<form class="tq-calculator" data-name="{name}" aria-label="{escape(TITLES[name])}" novalidate hidden>'
        f'{_inputs(name)}<p class="tq-problem" role="alert"></p><dl class="tq-results">{results}</dl>{figure}'
        f'<div class="tq-fields tq-share">{share}<label><span>&nbsp;</span>'
        '<button type="reset">Back to the opening case</button></label></div></form>'
    )


def _table(caption: str, head: list[str], rows: list[list[str]], more: str = "") -> str:
    """more: another class of the table."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="tq-scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="tq-cases {more}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _savings_table() -> str:
    rows = []
    for link in (800.0, 400.0, 200.0, 100.0, 25.0, 10.0):
        found = calculator.savings(savings.reference(link_gbit=link))
        fp32 = calculator.savings(savings.reference(link_gbit=link, base_bits=32.0))
        both = calculator.savings(savings.reference(link_gbit=link, zero=0.0))
        theirs = calculator.savings(savings.reference(link_gbit=link, base_bits=32.0, zero=0.0))
        span = f"{shown(found['saving_low'], 'percent')} to {shown(found['saving_high'], 'percent')}"
        cells = [
            f"{link:g} Gbit/s", shown(found["pays"], "pays"), shown(found["saving"], "percent"), span,
            shown(found["chance"], "percent"), shown(found["saved_usd"], "usd"), shown(found["share"], "percent"),
            shown(fp32["saving"], "percent"), shown(both["saving"], "percent"), shown(theirs["saving"], "percent"),
        ]  # fmt: skip
        rows.append(cells)
    head = ["Link per GPU", "Does it pay", "Saving", "80 % interval", "Chance of a saving", "Saved on the run",
            "Gradient sync not overlapped, share of the step", "Saving if gradients were fp32",
            "Saving without ZeRO, both phases quantized", "Both: the whitepaper's premises"]  # fmt: skip
    return _table("The reference job on other links", head, rows)


def job_table() -> str:
    """The reference job: every field with its range and where it comes from."""
    known, rows = savings.job(), []
    for field in savings.FIELDS:
        if field.name in known:
            each = known[field.name]
            words = dict(field.choices).get(each.value, f"{each.value:g}")
            span = "" if each.low == each.high else f"{each.low:g} to {each.high:g}"
            rows.append([field.label, f"{words} {field.unit if not field.choices else ''}".strip(), span, each.source])
    return _table("The reference job of this book", ["Input", "Value", "Range", "Source"], rows, "tq-sourced")


def _memory_table() -> str:
    base, rows = calculator.defaults("memory"), []
    fields = {field.name: field for field in calculator.FIELDS["memory"]}
    keys = ("weights_gib", "gradients_gib", "states_gib", "activations_gib", "total_gib", "largest_batch",
            "coded_activations_gib", "coded_total_gib", "coded_largest_batch")  # fmt: skip
    named, forms = {}, {}
    for result in RESULTS["memory"]:
        for key in (result.key, *result.others):
            named[key], forms[key] = (
                result.words.replace(",", " with codec," if key in result.others else ",", 1),
                result.form,
            )
    for value, words in fields["recompute"].choices:
        for parallel, how in fields["sequence_parallel"].choices:
            found = calculator.memory(base | {"recompute": value, "sequence_parallel": parallel})
            rows.append([words, how, *(shown(found[key], forms[key]) for key in keys)])
    head = ["Recomputed", "Sequence parallelism", *(named[key] for key in keys)]
    n = {name: f"{value:g}" for name, value in base.items()}
    caption = (
        f"The opening case with other settings: {n['layers']} layers of width {n['hidden']}, {n['seq']} tokens, "
        f"tensor × pipeline × data parallel {n['tp']} × {n['pp']} × {n['dp']}, ZeRO {n['zero']}; with codec: "
        f"{base['coded']:.0%} of the kept activations in {n['bits']} bits"
    )
    return _table(caption, head, rows)


def _codec_table() -> str:
    rows, columns = [], [each for each in RESULTS["codec"] if each.key != "bytes"]
    for bits in range(1, 9):
        found = run("codec", calculator.defaults("codec") | {"bits": float(bits)})
        rows.append([f"{bits}", *(shown(found[each.key], each.form) for each in columns)])
    head = ["Bits", *(each.words for each in columns)]
    return _table("Blocks of 128 with an fp32 scale; errors on Gaussian samples", head, rows)


def price_table() -> str:
    """List prices by GPU and kind over the providers of `data/prices.csv`, with the span of their dates."""
    book, rows = prices.load(), []
    for gpu in book.gpus:
        for kind in prices.KINDS:
            found = sorted(p.usd_per_gpu_hour for p in book.latest(book.newest) if (p.gpu, p.kind) == (gpu, kind))
            if found:
                spread = book.spread(gpu, kind, as_of=book.newest, max_age_days=100_000)
                days = sorted(p.date for p in book.latest(book.newest) if (p.gpu, p.kind) == (gpu, kind))
                span = f"{days[0]}" if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
                cells = [f"${each:.2f}" for each in (spread.low, spread.mid, spread.high)]
                rows.append([gpu, kind, *cells, f"{len(found)}", span])
    head = ["GPU", "Kind", "Lowest", "Median", "Highest", "Providers", "Read on"]
    return _table("USD an hour and GPU, list prices", head, rows)


TABLES = {"savings": _savings_table, "memory": _memory_table, "codec": _codec_table}


def html(name: str) -> str:
    """A calculator: its form, and below it cases that can be read without the script. "prices", "job": a table."""
    alone = {"prices": price_table, "job": job_table}
    if name in alone:
        return alone[name]()
    if name not in TITLES:
        raise ValueError(f"calculator={name!r}: accepted are {', '.join([*TITLES, *alone])}")
    return f"{form(name)}{TABLES[name]()}"


def script_data() -> str:
    """The JSON that a page with calculators carries once."""
    text = json.dumps(data(), allow_nan=False, ensure_ascii=True, separators=(",", ":")).replace("</", "<\\/")
    return f'<script type="application/json" id="tq-calculators">{text}</script>'

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

from tq.economics import calculator, prices
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
        Shown("saving", "Saving", "percent", "{saving_low} to {saving_high}"),
        Shown("saved_usd", "Saved on the run", "usd", "{saved_usd_low} to {saved_usd_high}"),
        Shown("plain_s", "Step, s", "number", "coded {coded_s}"),
        Shown("plain_hours", "Run, hours", "count", "coded {coded_hours}"),
        Shown("plain_usd", "Cost of the run", "usd", "coded {coded_usd}"),
        Shown("ratio", "Compression ratio", "fixed"),
        Shown("share", "Exposed exchange, share of the step", "percent"),
        Shown("breakeven_overhead", "Break-even overhead, ×", "number"),
        Shown("breakeven_gbit", "Break-even link, Gbit/s a GPU", "number"),
    ),
    "memory": (
        Shown("parameters_b", "Parameters, billion", "number"),
        Shown("weights_gib", "Weights, GiB", "fixed"),
        Shown("gradients_gib", "Gradients, GiB", "fixed"),
        Shown("states_gib", "Optimizer states, GiB", "fixed"),
        Shown("activations_gib", "Activations, GiB", "fixed", "coded {coded_activations_gib}"),
        Shown("working_gib", "Working space, GiB", "fixed", "coded {coded_working_gib}"),
        Shown("total_gib", "Total, GiB", "fixed", "coded {coded_total_gib}"),
        Shown("largest_batch", "Largest micro-batch, sequences", "count", "coded {coded_largest_batch}"),
    ),
    "codec": (
        Shown("bits_per_element", "Stored bits a number", "number"),
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


def presets() -> dict[str, dict[str, dict[str, float]]]:
    """calculator -> model -> the fields that it sets."""
    found: dict[str, dict[str, dict[str, float]]] = {"savings": {}, "memory": {}, "codec": {}}
    for name in ("llama2-7b", "llama2-13b", "llama2-70b", "gpt3-175b", "llama3-405b"):
        shape = Transformer.preset(name)
        found["savings"][name] = {"parameters_b": round(shape.parameters / 1e9, 3)}
        names = ("layers", "hidden", "heads", "seq", "vocab")
        found["memory"][name] = {each: float(getattr(shape, each)) for each in names}
    return found


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
        return "yes" if value > 0 else "no" if value < 0 else "depends on link and speed"
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


def form(name: str) -> str:
    """The form of a calculator; hidden until the script shows it."""
    known = presets()[name]
    fields = [_field(field) for field in calculator.FIELDS[name]]
    if known:
        options = "".join(f'<option value="{each}">{each}</option>' for each in known)
        words = '<span>Take the model from</span><select name="preset"><option value="">its own fields</option>'
        fields.insert(0, f"<label>{words}{options}</select></label>")
    results = "".join(_result(result, first=i == 0) for i, result in enumerate(RESULTS[name]))
    share = '<label><span>Link to this case</span><input type="text" name="link" readonly></label>'
    return (
        f'<form class="tq-calculator" data-name="{name}" aria-label="{escape(TITLES[name])}" novalidate hidden>'
        f'<div class="tq-fields">{"".join(fields)}</div>'
        f'<p class="tq-problem" role="alert"></p><dl class="tq-results">{results}</dl>'
        f'<div class="tq-fields tq-share">{share}<label><span>&nbsp;</span>'
        '<button type="reset">Back to the opening case</button></label></div></form>'
    )


def _table(caption: str, head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="tq-scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="tq-cases">'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _savings_table() -> str:
    base, rows = calculator.defaults("savings"), []
    for link in (800.0, 400.0, 200.0, 100.0, 25.0, 10.0):
        bf16 = calculator.savings(base | {"link_gbit": link, "base_bits": 16.0})
        fp32 = calculator.savings(base | {"link_gbit": link, "base_bits": 32.0})
        span = f"{shown(bf16['saving_low'], 'percent')} to {shown(bf16['saving_high'], 'percent')}"
        cells = [
            f"{link:g} Gbit/s", shown(bf16["share"], "percent"), shown(bf16["saving"], "percent"), span,
            shown(bf16["saved_usd"], "usd"), shown(bf16["breakeven_overhead"], "number"), shown(bf16["pays"], "pays"),
            shown(fp32["saving"], "percent"),
        ]  # fmt: skip
        rows.append(cells)
    around = f"with link and speed ± {base['uncertainty']:.0%}"
    head = ["Link a GPU", "Exchange, share of the step", "Saving", around, "Saved on the run",
            "Break-even overhead, ×", "Does it pay", "Saving against fp32"]  # fmt: skip
    n = {name: f"{value:g}" for name, value in base.items()}
    caption = (
        f"The opening case on other links: {n['parameters_b']} billion parameters, {n['gpus']} GPUs, "
        f"{n['gpus_per_replica']} a replica, {n['batch_m']} million tokens a step, {n['tflops']} TFLOP/s, "
        f"bf16 gradients in {n['bits']} bits, an overhead of {n['overhead']}, ${n['usd_per_gpu_hour']} an hour and GPU"
    )
    return _table(caption, head, rows)


def _memory_table() -> str:
    base, rows = calculator.defaults("memory"), []
    fields = {field.name: field for field in calculator.FIELDS["memory"]}
    keys = ("weights_gib", "gradients_gib", "states_gib", "activations_gib", "total_gib", "largest_batch",
            "coded_activations_gib", "coded_total_gib", "coded_largest_batch")  # fmt: skip
    named, forms = {}, {}
    for result in RESULTS["memory"]:
        for key in (result.key, *result.others):
            named[key], forms[key] = (
                result.words.replace(",", " coded," if key in result.others else ",", 1),
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
        f"tensor × pipeline × data parallel {n['tp']} × {n['pp']} × {n['dp']}, ZeRO {n['zero']}; coded: "
        f"{base['coded']:.0%} of the kept activations in {n['bits']} bits"
    )
    return _table(caption, head, rows)


def _codec_table() -> str:
    rows, columns = [], [each for each in RESULTS["codec"] if each.key != "bytes"]
    for bits in range(1, 9):
        found = run("codec", calculator.defaults("codec") | {"bits": float(bits)})
        rows.append([f"{bits}", *(shown(found[each.key], each.form) for each in columns)])
    head = ["Bits", *(each.words for each in columns)]
    return _table("Blocks of 128 with an fp32 scale; errors on Gaussian numbers", head, rows)


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
    """A calculator: its form, and below it cases that can be read without the script. "prices": the table alone."""
    if name == "prices":
        return price_table()
    if name not in TITLES:
        raise ValueError(f"calculator={name!r}: accepted are {', '.join([*TITLES, 'prices'])}")
    return f"{form(name)}{TABLES[name]()}"


def script_data() -> str:
    """The JSON that a page with calculators carries once."""
    text = json.dumps(data(), allow_nan=False, ensure_ascii=True, separators=(",", ":")).replace("</", "<\\/")
    return f'<script type="application/json" id="tq-calculators">{text}</script>'

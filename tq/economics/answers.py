"""The answers of the command line: each command turns its options into what `--json` prints and into lines of text."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

from tq.economics import breakeven, calculator, console, pareto, prices, training_cost
from tq.economics.intervals import Interval
from tq.systems import Bits, Cluster, Compression, Layout, Transformer, best, hardware, layouts, memory
from tq.systems.efficiency import software_facts
from tq.systems.memory import Memory
from tq.systems.parallel import USABLE

GIB = 2.0**30
Answer = tuple[dict[str, Any], list[str]]  # what JSON shows, and the lines of the text


# --- from words to records ------------------------------------------------------------------------------------


def _shape(given: argparse.Namespace) -> Transformer:
    names = ("layers", "hidden", "heads", "vocab", "seq", "kv_heads", "ffn", "gated")
    own = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if given.model is not None:
        return Transformer.preset(given.model, **own)
    lacking = [name for name in names[:5] if name not in own]
    if lacking:
        raise ValueError(f"a model needs --model NAME, or also --{' --'.join(lacking)}")
    return Transformer(**own)


def _layout(given: argparse.Namespace, dp: int | None = None, micro_batch: int | None = None) -> Layout:
    dp = given.dp if dp is None else dp
    each = given.micro_batch if micro_batch is None else micro_batch
    asked = given.global_batch is not None and micro_batch is None
    batch = given.global_batch if asked else max(8, given.pp) * each * dp
    return Layout(
        tp=given.tp, pp=given.pp, dp=dp, micro_batch=each, global_batch=batch, recompute=given.recompute,
        sequence_parallel=given.tp > 1 and not given.no_sequence_parallel, interleave=given.interleave, zero=given.zero,
        cp=given.cp, ep=given.ep,
    )  # fmt: skip


def _offers(given: argparse.Namespace, gpu: str) -> list[prices.Price]:
    book = prices.load(given.prices)
    return book.find(gpu, given.kind, given.provider, as_of=given.as_of, max_age_days=given.max_age_days)


def _cluster(gpu: str, gpus: int, network: str | None, gbit: float | None) -> Cluster:
    """network: a tier that was asked for; gbit: what the offer states. Neither: the usual port of that GPU."""
    if network is None and gbit is not None:
        return Cluster(gpu, gpus, inter_bytes_per_s=hardware.gbit(gbit))
    return Cluster(gpu, gpus, network)


# --- the commands ---------------------------------------------------------------------------------------------


def _range(interval: Interval, form: str = ",.0f", unit: str = "") -> str:
    if interval.low == interval.high:
        return f"{interval.mid:{form}}{unit}"
    return f"{interval.mid:{form}}{unit} ({interval.low:{form}} to {interval.high:{form}})"


def savings(given: argparse.Namespace) -> Answer:
    case = calculator.defaults("savings")
    for name in case:
        if getattr(given, name) is not None:
            case[name] = getattr(given, name)
    if given.model is not None:
        case["parameters_b"] = Transformer.preset(given.model).parameters / 1e9
    if given.baseline is not None:
        case["base_bits"] = {"bf16": 16.0, "fp32": 32.0}[given.baseline]
    found = calculator.savings(case)
    pays = {1.0: "yes", 0.0: "depends on link and speed", -1.0: "no"}[found["pays"] or 0.0]
    link = found["breakeven_gbit"]
    n = {name: value if value is not None else 0.0 for name, value in found.items()}
    lines = [
        f"step time           {n['plain_s']:.3f} s without, {n['coded_s']:.3f} s with compression of {n['ratio']:.2f}x",
        f"of it exposed       {n['share']:.1%} is data-parallel exchange without compression",
        f"saving              {n['saving']:.1%} ({n['saving_low']:.1%} to {n['saving_high']:.1%}; "
        f"link and speed give or take {case['uncertainty']:.0%})",
        f"run without         {n['plain_hours']:,.0f} h, ${n['plain_usd']:,.0f}",
        f"run with            {n['coded_hours']:,.0f} h, ${n['coded_usd']:,.0f}",
        f"saved               ${n['saved_usd']:,.0f} (${n['saved_usd_low']:,.0f} to ${n['saved_usd_high']:,.0f})",
        f"break-even overhead {n['breakeven_overhead']:.3f}x",
        "break-even link     " + ("none: it pays on any link" if link is None else f"{link:,.0f} Gbit/s a GPU"),
        f"does it pay         {pays}",
    ]
    return {"case": case, **found, "pays": pays}, lines


def memory_by_part(given: argparse.Namespace) -> Answer:
    shape, layout, gpu = _shape(given), _layout(given), hardware.gpu(given.gpu)
    room = gpu.memory_bytes - given.reserve_gib * GIB
    if room <= 0:
        raise ValueError(
            f"--reserve-gib must be from 0 to less than {gpu.memory_bytes / GIB:g}, got {given.reserve_gib:g}"
        )
    coded = Compression(
        activations=Bits(given.activation_bits) if given.activation_bits is not None else None,
        states=Bits(given.state_bits) if given.state_bits is not None else None,
    )
    cases: dict[str, Compression | None] = {"without compression": None}
    if coded.activations or coded.states:
        cases["with compression"] = coded
    facts = software_facts(given.software)

    def holds(layout: Layout, compression: Compression | None) -> Memory:
        return memory(shape, layout, compression=compression, **facts.memory)

    def largest(compression: Compression | None) -> int:
        def fits(batch: int) -> bool:
            return holds(_layout(given, micro_batch=batch), compression).total <= room

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    parts = ("weights", "gradients", "states", "activations", "working", "total")
    found: dict[str, Any] = {
        "gpu": given.gpu, "gpu_gib": gpu.memory_bytes / GIB, "parameters": shape.parameters,
        "software": given.software,
    }  # fmt: skip
    lines = [
        f"{shape.parameters / 1e9:.2f}B parameters on {given.gpu} with {gpu.memory_bytes / GIB:.4g} GiB, "
        f"{given.software}"
    ]
    for name, compression in cases.items():
        held = holds(layout, compression)
        row = {f"{part}_gib": float(getattr(held, part)) / GIB for part in parts}
        row["largest_micro_batch"] = largest(compression)
        found[name.replace(" ", "_")] = row
        lines.append(f"{name}: " + ", ".join(f"{part} {row[f'{part}_gib']:.2f}" for part in parts) + " GiB")
        row["fits"] = held.total <= room
        fits = "fits" if row["fits"] else "does not fit"
        lines.append(f"  {fits}; largest micro-batch: {row['largest_micro_batch']} sequences")
    return found, lines


def _gpus_needed(shape: Transformer, gpu: str, gpus: int, batch: int, software: str) -> int | None:
    """The least doubling of gpus on which some layout fits; None: none up to 64 times as many."""
    for doublings in range(7):
        count = gpus << doublings
        if next(layouts(shape, Cluster(gpu, count), batch, software=software), None) is not None:
            return count
    return None


def _fit(given: argparse.Namespace, shape: Transformer, layout: Layout, need_gib: float) -> tuple[dict[str, Any], str]:
    """Whether a predicted run fits its GPUs, for JSON and in words ("" where it does)."""
    gpu_gib = hardware.gpu(given.gpu).memory_bytes / GIB
    found: dict[str, Any] = {"fits": need_gib <= USABLE * gpu_gib, "usable_gib": USABLE * gpu_gib, "gpus_needed": None}
    if found["fits"]:
        return found, ""
    needed = _gpus_needed(shape, given.gpu, layout.gpus, layout.global_batch, given.software)
    found["gpus_needed"] = needed
    text = f"DOES NOT FIT: {need_gib:.1f} GiB are needed, {USABLE * gpu_gib:.1f} of {gpu_gib:.4g} can be used; "
    if needed is None:
        return found, text + f"nor does a batch of {layout.global_batch} on 64 times as many GPUs"
    others = (
        f"another layout of the {needed} GPUs fits" if needed == layout.gpus else f"{needed} GPUs have one that fits"
    )
    return found, text + others


def cost(given: argparse.Namespace) -> Answer:
    shape, layout, gbit = _shape(given), _layout(given), None
    if given.price is not None:
        if given.provider is not None:
            raise ValueError("--price is in place of --provider: accepted is one of them, got both")
        price = training_cost.as_interval("price", given.price)
    else:
        found_prices = _offers(given, given.gpu)
        price = prices.spread(found_prices)
        gbit = found_prices[0].network_gbit_per_gpu if given.provider else None
    cluster = _cluster(given.gpu, layout.gpus, given.network, gbit)
    rate = given.checkpoint_gb_s
    failures = training_cost.Failures(rate * 1e9) if rate is not None else None
    cases: dict[str, Compression | None] = {"without compression": None}
    if given.gradient_bits is not None:
        cases["with compression"] = Compression(gradients=Bits(given.gradient_bits))
    rate_gbit = float(cluster.inter_bytes_per_s) * 8 / 1e9
    found: dict[str, Any] = {
        "gpus": layout.gpus, "usd_per_gpu_hour": dataclasses.asdict(price), "network_gbit_per_gpu": rate_gbit,
        "level": training_cost.LEVEL,
    }  # fmt: skip
    lines = [f"{shape.parameters / 1e9:.2f}B parameters, {given.tokens:.3g} tokens, {layout.gpus} {given.gpu}"]
    lines[0] += f" on {rate_gbit:g} Gbit/s a GPU"
    for name, compression in cases.items():
        run = training_cost.run_cost(
            shape, layout, cluster, given.tokens, price, software=given.software, compression=compression,
            region=given.region, failures=failures, samples=given.samples, seed=given.seed,
        )  # fmt: skip
        intervals = ("iteration_s", "hours", "gpu_hours", "usd", "kwh", "carbon_kg", "published_gpu_hours")
        row: dict[str, Any] = {each: dataclasses.asdict(getattr(run, each)) for each in intervals}
        row["waste"] = dataclasses.asdict(run.waste) if run.waste else None
        row["memory_gib"] = float(run.prediction.memory_gib)
        fit, warning = _fit(given, shape, layout, row["memory_gib"])
        row |= fit
        row["tornado_usd"] = [dataclasses.asdict(bar) for bar in run.tornado]
        found[name.replace(" ", "_")] = row
        days = run.hours * (1 / 24)
        lines += [
            f"{name}:",
            *([f"  {warning}"] if warning else []),
            f"  iteration    {_range(run.iteration_s, '.3f', ' s')}, {row['memory_gib']:.1f} GiB a GPU",
            f"  wall time    {_range(days, ',.1f', ' days')}, {_range(run.gpu_hours)} GPU-hours",
            f"  cost         ${_range(run.usd)}",
            f"  electricity  {_range(run.kwh * 1e-3, ',.1f', ' MWh')}",
            f"  carbon       {_range(run.carbon_kg * 1e-3, ',.1f', ' t CO2e')} in {given.region}",
        ]
        if run.waste:
            lines.append(
                f"  failures     {run.waste.share:.1%} lost, a checkpoint every {run.waste.interval_s / 60:.0f} min"
            )
        whole = run.published_gpu_hours
    lines.append(f"published whole runs lead to expect {_range(whole)} GPU-hours")
    if "with compression" in cases:
        compression = cases["with compression"]
        assert compression is not None
        saved = training_cost.compression_saving(
            shape, layout, cluster, compression, software=given.software, samples=given.samples, seed=given.seed
        )
        found["saving"] = dataclasses.asdict(saved.saving) | {"chance": saved.chance}
        lines.append(f"saving: {_range(saved.saving, '.1%')}, positive in {saved.chance:.0%} of the samples")
    lines.append("ranges: 80 % intervals; prices: lowest, median and highest provider unless one is named")
    return found, lines


def breakeven_table(given: argparse.Namespace) -> Answer:
    base = {"bf16": 16.0, "fp32": 32.0}[given.baseline]
    ratio = float(breakeven.ratio(given.bits, given.block, 32, base))
    grid = breakeven.surface(
        given.share, given.link, given.overhead, base_bits=base, bits=given.bits, block=given.block,
        reference_gbit=given.reference,
    )  # fmt: skip
    at_link = breakeven.share_at_link(
        [[f] for f in given.share], [link * 16 / base for link in given.link], given.reference
    )
    limits = breakeven.breakeven_overhead(at_link, ratio)
    rows = []
    lines = [
        f"saving against {given.baseline}, ratio {ratio:.2f}; share: with bf16 on {given.reference:g} Gbit/s",
        "share  link Gbit/s  share there  break-even k" + "".join(f"   k={k:<6g}" for k in given.overhead),
    ]
    for i, f in enumerate(given.share):
        for j, link in enumerate(given.link):
            there, limit = float(at_link[i, j]), float(limits[i, j])
            row = [float(value) for value in grid[i, j]]
            rows.append(
                {"share": f, "link_gbit": link, "share_there": there, "breakeven_overhead": limit,
                 "saving": dict(zip(map(str, given.overhead), row, strict=True))}
            )  # fmt: skip
            lines.append(f"{f:<6.3g} {link:<12g} {there:<12.3f} {limit:<12.3f}" + "".join(f" {v:>9.1%}" for v in row))
    return {"ratio": ratio, "baseline": given.baseline, "reference_gbit": given.reference, "rows": rows}, lines


def pareto_front(given: argparse.Namespace) -> Answer:
    shape, book = _shape(given), prices.load(given.prices)
    providers = sorted({price.provider for price in book.prices})
    if given.provider not in (None, *providers):
        raise ValueError(f"provider={given.provider!r}: accepted are {', '.join(providers)}")
    clusters: list[tuple[str, list[prices.Price], float | None, int]] = []
    for gpu in book.gpus:
        if not any(p.gpu == gpu and p.kind == given.kind and given.provider in (None, p.provider) for p in book.prices):
            continue
        found = [p for p in _offers(given, gpu) if p.network_gbit_per_gpu is not None or not given.stated_network]
        for gbit in sorted({p.network_gbit_per_gpu for p in found}, key=lambda rate: rate or 0.0):
            asked = [p for p in found if p.network_gbit_per_gpu == gbit]
            clusters += [(gpu, asked, gbit, count) for count in given.gpus]
    offers: list[dict[str, Any]] = []
    skipped: list[str] = []
    for gpu, asked, gbit, count in console.progress(clusters, lambda it: f"{it[3]} {it[0]}"):
        cluster = _cluster(gpu, count, None, gbit)
        try:
            layout, step = best(shape, cluster, given.batch, given.software)
        except ValueError as error:
            skipped.append(str(error))
            continue
        hours = given.tokens / step.tokens_per_iteration * float(step.iteration_s) / 3600
        for price in asked:
            offers.append({
                "provider": price.provider, "gpu": gpu, "gpus": count, "kind": price.kind,
                "usd_per_gpu_hour": price.usd_per_gpu_hour, "date": price.date.isoformat(),
                "network_gbit_per_gpu": float(cluster.inter_bytes_per_s) * 8 / 1e9,
                "network_is_stated": gbit is not None, "hours": hours,
                "usd": hours * count * price.usd_per_gpu_hour, "layout": dataclasses.asdict(layout),
            })  # fmt: skip
    if not offers:
        raise ValueError("no offer fits: " + ("; ".join(skipped) or "no price of that kind and provider"))
    keep = pareto.front([o["hours"] for o in offers], [o["usd"] for o in offers])
    for offer, good in zip(offers, keep, strict=True):
        offer["on_front"] = bool(good)
    offers.sort(key=lambda offer: (offer["hours"], offer["usd"]))
    shown = [offer for offer in offers if given.all or offer["on_front"]]
    lines = [
        f"{'*' if o['on_front'] else ' '} {o['hours'] / 24:8.1f} days  ${o['usd']:>13,.0f}  "
        f"{o['gpus']:>5} {o['gpu']:<11} {o['provider']} at ${o['usd_per_gpu_hour']:.2f} ({o['kind']}, {o['date']})"
        + ("" if o["network_is_stated"] else ", network assumed")
        for o in shown
    ]
    lines += [f"left out: {text}" for text in skipped]
    return {"offers": shown, "left_out": skipped}, lines


def _every_price(given: argparse.Namespace, book: prices.PriceBook) -> tuple[list[prices.Price], int]:
    """The newest prices of every GPU that are fresh, and how many are not."""
    found: list[prices.Price] = []
    errors: list[ValueError] = []
    stale = 0
    for gpu in book.gpus:
        options = {"as_of": given.as_of, "max_age_days": given.max_age_days}
        try:
            found += (fresh := book.find(gpu, given.kind, given.provider, **options))
        except prices.StalePrices as error:
            fresh = []
            errors.insert(0, error)
        except ValueError as error:  # no such price of this GPU, or an unknown provider
            errors.append(error)
            continue
        known = [p for p in book.latest(given.as_of) if p.gpu == gpu and p.kind == given.kind]
        stale += sum(given.provider in (None, p.provider) for p in known) - len(fresh)
    if not found:
        raise errors[0]
    return found, stale


def _storage(given: argparse.Namespace) -> list[prices.StoragePrice]:
    """Fresh prices of storage, of one provider where one is named."""
    known, today = prices.storage(), given.as_of or datetime.date.today()
    providers = sorted({price.provider for price in known})
    if given.provider not in (None, *providers):
        raise ValueError(f"provider={given.provider!r}: accepted are {', '.join(providers)}")
    found = [price for price in known if price.date <= today and given.provider in (None, price.provider)]
    fresh = [price for price in found if (today - price.date).days <= given.max_age_days]
    if not fresh:
        what = "are stale: none is within --max-age-days" if found else "are unknown: none is dated on or before it"
        raise prices.StalePrices(f"prices of storage on {today} {what}")
    return fresh


def price_list(given: argparse.Namespace) -> Answer:
    if given.check is not None:
        problems = prices.check(given.check)
        return {"file": str(given.check), "problems": problems}, problems or [
            f"{given.check}: nothing is wrong with it"
        ]
    if given.take_in is not None:
        added = prices.take_in(given.take_in, given.prices)
        return {"added": added}, [f"{added} new prices"]
    rows: list[dict[str, Any]]
    if given.storage:
        rows = [dataclasses.asdict(price) | {"date": price.date.isoformat()} for price in _storage(given)]
        lines = [
            f"${r['usd_per_gb_month']:.4f} a GB and month  {r['provider']}, {r['kind']} ({r['date']})" for r in rows
        ]
        return {"storage": rows}, lines
    book, stale = prices.load(given.prices), 0
    if given.gpu is not None:
        found = book.find(given.gpu, given.kind, given.provider, as_of=given.as_of, max_age_days=given.max_age_days)
    else:
        found, stale = _every_price(given, book)
    rows = [dataclasses.asdict(price) | {"date": price.date.isoformat()} for price in found]
    lines = [f"{r['gpu']:<11} ${r['usd_per_gpu_hour']:7.3f}  {r['provider']}, {r['kind']}, {r['date']}" for r in rows]
    if stale:
        lines.append(f"left out: {stale} prices older than {given.max_age_days} days (--max-age-days)")
    return {"newest": book.newest.isoformat(), "prices": rows, "stale": stale}, lines


COMMANDS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "savings": savings, "memory": memory_by_part, "cost": cost, "breakeven": breakeven_table, "pareto": pareto_front,
    "prices": price_list,
}  # fmt: skip

"""The commands of the command line: each turns its options into a record of `tq.economics.reports`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from tq.economics import breakeven, calculator, pareto, prices, reports, run_cost, terminal
from tq.economics import savings as saved
from tq.economics.intervals import Interval
from tq.economics.reports import GIB, Dates, Report
from tq.systems import Bits, Cluster, Compression, Layout, Transformer, best, hardware, layouts, memory, renewal
from tq.systems.bisect import largest
from tq.systems.efficiency import software_facts
from tq.systems.failures import mtbf_s
from tq.systems.memory import Memory
from tq.systems.parallel import USABLE

MOST = 10**9  # sequences that a micro-batch is looked for among
EVER = 10**7  # days: older than any date


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


def savings(given: argparse.Namespace) -> Report:
    asked = {field.name: getattr(given, field.name) for field in calculator.FIELDS["savings"]}
    changes = {name: value for name, value in asked.items() if value is not None}
    if given.model is not None:
        changes["parameters_b"] = Transformer.preset(given.model).parameters / 1e9
    if given.baseline is not None:
        changes["base_bits"] = {"bf16": 16.0, "fp32": 32.0}[given.baseline]
    case = saved.reference(**changes)
    case = saved.exactly(case) if given.exactly else case
    return reports.Savings(case, calculator.savings(case))


def memory_by_part(given: argparse.Namespace) -> Report:
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
    facts = software_facts(given.software)

    def holds(layout: Layout, compression: Compression | None) -> Memory:
        return memory(shape, layout, compression=compression, **facts.memory)

    def case(compression: Compression | None) -> reports.MemoryCase:
        held = holds(layout, compression)
        parts = (held.weights, held.gradients, held.states, held.activations, held.working, held.total)
        most = largest(lambda batch: holds(_layout(given, micro_batch=batch), compression).total <= room, MOST)
        return reports.MemoryCase(most, held.total <= room, *(float(part) / GIB for part in parts))

    cases = {"without compression": case(None)}
    if coded.activations or coded.states:
        cases["with compression"] = case(coded)
    return reports.MemoryByPart(given.gpu, gpu.memory_bytes / GIB, shape.parameters, given.software, cases)


def _gpus_needed(shape: Transformer, gpu: str, gpus: int, batch: int, software: str) -> int | None:
    """The least doubling of gpus on which some layout fits; None: none up to 64 times as many."""
    for doublings in range(7):
        count = gpus << doublings
        if next(layouts(shape, Cluster(gpu, count), batch, software=software), None) is not None:
            return count
    return None


def _fit(given: argparse.Namespace, shape: Transformer, layout: Layout, need_gib: float) -> reports.Fit:
    """Whether a predicted run fits its GPUs."""
    gpu_gib = hardware.gpu(given.gpu).memory_bytes / GIB
    fit = reports.Fit(need_gib <= USABLE * gpu_gib, USABLE * gpu_gib, gpu_gib, layout.gpus, layout.global_batch)
    if fit.fits:
        return fit
    needed = _gpus_needed(shape, given.gpu, layout.gpus, layout.global_batch, given.software)
    return dataclasses.replace(fit, gpus_needed=needed)


def _price(given: argparse.Namespace) -> tuple[Interval, Dates | None, float | None]:
    """(USD an hour and GPU, the days of the prices, the network of the one provider that was asked for)."""
    if given.price is not None:
        if given.provider is not None:
            raise ValueError("--price is in place of --provider: accepted is one of them, got both")
        return run_cost.as_interval("price", given.price), None, None
    found = _offers(given, given.gpu)
    return prices.spread(found), Dates.of(found), found[0].network_gbit_per_gpu if given.provider else None


def cost(given: argparse.Namespace) -> Report:
    shape, layout = _shape(given), _layout(given)
    price, dates, gbit = _price(given)
    cluster = _cluster(given.gpu, layout.gpus, given.network, gbit)
    rate = given.checkpoint_gb_s
    failures = run_cost.Failures(rate * 1e9) if rate is not None else None
    coded = None if given.gradient_bits is None else Compression(gradients=Bits(given.gradient_bits))

    def case(compression: Compression | None) -> reports.CostCase:
        run = run_cost.run_cost(
            shape, layout, cluster, given.tokens, price, software=given.software, compression=compression,
            region=given.region, failures=failures, samples=given.samples, seed=given.seed,
        )  # fmt: skip
        return reports.CostCase(run, _fit(given, shape, layout, float(run.prediction.memory_gib)))

    cases, saving = {"without compression": case(None)}, None
    if coded is not None:
        cases["with compression"] = case(coded)
        saving = run_cost.compression_saving(
            shape, layout, cluster, coded, software=given.software, samples=given.samples, seed=given.seed
        )
    return reports.Cost(
        shape.parameters, given.tokens, layout.gpus, given.gpu, price, dates,
        float(cluster.inter_bytes_per_s) * 8 / 1e9, given.region, run_cost.LEVEL, cases, saving,
    )  # fmt: skip


def checkpoints(given: argparse.Namespace) -> Report:
    parameters = _shape(given).parameters if given.parameters_b is None else given.parameters_b * 1e9
    price, dates, _ = _price(given)
    size = parameters * given.bytes_per_parameter / given.ratio
    write, hours = size / (given.write_gb_s * 1e9), given.mtbf_h
    mtbf = float(mtbf_s(given.gpus)) if hours is None else hours * 3600
    best_s = renewal.best_interval_s(write, mtbf, given.restart_s, given.lives_shape)

    def waste(interval: float) -> float:
        return renewal.waste(interval, write, mtbf, given.restart_s, given.lives_shape)

    interval = best_s if given.interval_min is None else given.interval_min * 60
    return reports.Checkpoints(
        parameters, given.gpus, size, write, mtbf, given.restart_s, given.lives_shape, interval, waste(interval),
        write / (interval + write), best_s, waste(best_s), price, dates,
    )  # fmt: skip


def breakeven_table(given: argparse.Namespace) -> Report:
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
    rows = [
        reports.BreakevenRow(
            f, link, float(at_link[i, j]), float(limits[i, j]),
            dict(zip(map(str, given.overhead), map(float, grid[i, j]), strict=True)),
        )
        for i, f in enumerate(given.share)
        for j, link in enumerate(given.link)
    ]  # fmt: skip
    return reports.Breakeven(ratio, given.baseline, given.reference, rows)


def _clusters(given: argparse.Namespace) -> list[tuple[str, list[prices.Price], float | None, int]]:
    """(GPU, its offers on one network, that network's Gbit/s a GPU, size) of each cluster to try."""
    book = prices.load(given.prices)
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
    return clusters


def pareto_front(given: argparse.Namespace) -> Report:
    shape = _shape(given)
    offers: list[reports.Offer] = []
    skipped: list[str] = []
    for gpu, asked, gbit, count in terminal.progress(_clusters(given), lambda it: f"{it[3]} {it[0]}"):
        cluster = _cluster(gpu, count, None, gbit)
        try:
            layout, step = best(shape, cluster, given.batch, given.software)
        except ValueError as error:
            skipped.append(str(error))
            continue
        hours = given.tokens / step.tokens_per_iteration * float(step.iteration_s) / 3600
        rate = float(cluster.inter_bytes_per_s) * 8 / 1e9
        offers += [
            reports.Offer(
                price.provider, gpu, count, price.kind, price.usd_per_gpu_hour, price.date, rate, gbit is not None,
                hours, hours * count * price.usd_per_gpu_hour, dataclasses.asdict(layout),
            )
            for price in asked
        ]  # fmt: skip
    if not offers:
        raise ValueError("no offer fits: " + ("; ".join(skipped) or "no price of that kind and provider"))
    keep = pareto.front([offer.hours for offer in offers], [offer.usd for offer in offers])
    offers = [dataclasses.replace(offer, on_front=bool(good)) for offer, good in zip(offers, keep, strict=True)]
    dates = Dates(min(offer.date for offer in offers), max(offer.date for offer in offers))
    offers.sort(key=lambda offer: (offer.hours, offer.usd))
    return reports.Front(dates, [offer for offer in offers if given.all or offer.on_front], skipped)


def _every_price(given: argparse.Namespace, book: prices.PriceBook) -> tuple[list[prices.Price], int]:
    """The newest prices of every GPU that are fresh, and how many are not; all of them where none is."""
    known: list[prices.Price] = []
    error = ValueError(f"{book.path.name} holds no price")
    for gpu in book.gpus:
        try:
            known += book.find(gpu, given.kind, given.provider, as_of=given.as_of, max_age_days=EVER)
        except ValueError as reason:  # no such price of this GPU, or an unknown provider
            error = reason
    if not known:
        raise error
    found = [price for price in known if price.age_days(given.as_of) <= given.max_age_days]
    if not found:
        prices.warn_of_age(f"{given.kind} prices", prices.days(known)[1], given.as_of, given.max_age_days)
        return known, 0
    return found, len(known) - len(found)


def _storage(given: argparse.Namespace) -> list[prices.StoragePrice]:
    """Fresh prices of storage, of one provider where one is named; all of them where none is fresh."""
    known, today = prices.storage(), given.as_of
    providers = sorted({price.provider for price in known})
    if given.provider not in (None, *providers):
        raise ValueError(f"provider={given.provider!r}: accepted are {', '.join(providers)}")
    found = [price for price in known if price.date <= today and given.provider in (None, price.provider)]
    if not found:
        raise ValueError(f"prices of storage on {today} are unknown: none is dated on or before it")
    fresh = [price for price in found if (today - price.date).days <= given.max_age_days]
    if not fresh:
        prices.warn_of_age("prices of storage", prices.days(found)[1], today, given.max_age_days)
    return fresh or found


def price_list(given: argparse.Namespace) -> Report:
    if given.check is not None:
        return reports.Check(str(given.check), prices.check(given.check))
    if given.take_in is not None:
        return reports.Taken(prices.take_in(given.take_in, given.prices))
    if given.storage:
        storage = _storage(given)
        return reports.StorageList(Dates.of(storage), storage)
    book, stale = prices.load(given.prices), 0
    if given.gpu is not None:
        found = _offers(given, given.gpu)
    else:
        found, stale = _every_price(given, book)
    return reports.PriceList(book.newest, Dates.of(found), found, stale, given.max_age_days)


COMMANDS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "savings": savings, "memory": memory_by_part, "cost": cost, "checkpoint": checkpoints,
    "breakeven": breakeven_table, "pareto": pareto_front, "prices": price_list,
}  # fmt: skip

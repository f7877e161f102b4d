"""The measurements of `tq.lab.{hierarchy,pool,lifetimes,streaming,tiled_attention}` as tasks of a chapter.

Plain arguments in, plain numbers out. Files lie in the folder for temporary ones; a folder in memory is told by
``direct``: 0 where transfers could not go past the page cache. One task at a time: they share processors and disk.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tq.lab import hierarchy, lifetimes, pool, streaming, tiled_attention
from tq.systems import tiers
from tq.train.model import GPT, GPTConfig

KIB, MIB = 1 << 10, 1 << 20
NAMES = {4 * KIB: "4kib", 64 * KIB: "64kib", 4 * MIB: "4mib"}
CAPACITY = {4 * KIB: 4096, 64 * KIB: 512, 4 * MIB: 32}  # blocks: 16, 32 and 128 MiB
WAYS = (("cyclic", "lru"), ("cyclic", "mru"), ("cyclic", "belady"), ("sawtooth", "lru"), ("sawtooth", "belady"))


def measure(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """The function of this module that ``task["what"]`` names, with the other fields but "turn" as arguments, and the
    task beside what it returns. device: always the CPU."""
    arguments = {name: value for name, value in task.items() if name not in ("what", "turn")}
    return {"task": task, **_FUNCTIONS[task["what"]](**arguments)}


def latency(sizes: list[int], huge: bool, steps: int, seed: int) -> dict[str, Any]:
    """Seconds of a dependent load over sets of so many bytes, on huge pages or on small ones, and the share of each
    set that the system gave huge pages; None where it does not tell."""
    seconds, given = zip(*(hierarchy.latency_s(size, huge, steps, seed) for size in sizes), strict=True)
    return {"seconds": list(seconds), "huge_share": list(given), "named": hierarchy.caches()}


def rates(sizes: list[int]) -> dict[str, Any]:
    """Bytes a second that are read, and copied, within sets of so many bytes."""
    return {
        "read": [hierarchy.read_bytes_per_s(size) for size in sizes],
        "copy": [hierarchy.copy_bytes_per_s(size) for size in sizes],
    }


def disk(nbytes: int, depth: int) -> dict[str, Any]:
    """``hierarchy.disk_rates`` in the folder for temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        return dict(hierarchy.disk_rates(folder, nbytes, depth))


def cliff(block: int, capacity: int, ratio: float, trace: str, policy: str) -> dict[str, Any]:
    """A point of ``pool.cliff``, with its slowdown over a hit as measured and as modelled."""
    with tempfile.TemporaryDirectory() as folder:
        point = pool.cliff(folder, block, capacity, ratio, trace, policy, rounds=7)
    return {**point, "slowdown": pool.slowdown(point), "modelled": pool.modelled(point)}


def ahead(block: int, capacity: int, ratio: float, factor: float) -> dict[str, Any]:
    """``pool.ahead`` with ``factor`` times as long a computation on a block as its read takes."""
    with tempfile.TemporaryDirectory() as folder:
        read_s = block / hierarchy.disk_rates(folder, block, 1)["read"]
        return {"read_s": read_s, **pool.ahead(folder, block, capacity, ratio, factor * read_s)}


def product(n: int, block: int, seed: int, ways: Sequence[str] = hierarchy.WAYS) -> dict[str, Any]:
    """Seconds and relative error of a product in each way."""
    found = {way: hierarchy.product_s(n, way, block, seed) for way in ways}
    return {"seconds": {way: took for way, (took, _) in found.items()}, "error": max(e for _, e in found.values())}


def attention(tokens: int, head_size: int, seed: int) -> dict[str, Any]:
    """Largest difference of both ways in fp64, and the bytes that each moves and holds in fp32."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, head_size, generator=generator, dtype=torch.float64) for _ in range(3))
    nothing = tiled_attention.Traffic()
    exact = tiled_attention.plain(q, k, v, nothing)
    error = float((tiled_attention.tiled(q, k, v, nothing) - exact).abs().max())
    found: dict[str, Any] = {"error": error}
    ways: dict[str, Callable[..., Tensor]] = {"plain": tiled_attention.plain, "tiled": tiled_attention.tiled}
    for way, function in ways.items():
        traffic = tiled_attention.Traffic()
        function(q.float(), k.float(), v.float(), traffic)
        found[way] = {"moved": traffic.moved, "peak": traffic.peak}
    return found


def recorded(layers: int, fused: bool, seed: int) -> dict[str, Any]:
    """The order in which a real step uses weights and moments of its layers, and the peaks of what it holds.

    fused: moments are used as soon as their gradient is there, which is then let go of; else in a sweep afterwards.
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(layers=layers, hidden=32, heads=2, vocab=256, seq=16))
    recorder = lifetimes.Recorder(model)
    ids = torch.randint(0, 256, (2, 16))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if fused:
        owners = {id(p): number for number, block in enumerate(model.blocks.children()) for p in block.parameters()}

        def update(p: Tensor) -> None:
            recorder.use("moments", id(p), owners.get(id(p), -1), 8 * p.numel())

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    recorder.step(lambda: model(ids, ids)[1], optimizer)
    recorder.close()
    lives = [life for life in recorder.lives.values() if life.layer >= 0]
    return {
        "trace": recorder.layer_trace(("weight", "moments")).tolist(),
        "peak": {kind: recorder.peak(kind) for kind in ("gradient", "activation")},
        "bytes": {kind: sum(life.nbytes for life in lives if life.kind == kind) for kind in ("weight", "gradient")},
    }


def misses_per_layer(trace: list[int], capacity: int, policy: str) -> float:
    """Misses of a step over its layers, in the mean of steps that repeat the trace."""
    return tiers.steady_misses(trace, capacity, policy) / (max(trace) + 1)


def streamed(beside: bool, run: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a streamed step as forecast by arithmetic and by a trial, and as measured (medians but for the first
    two steps), bytes as counted over those of the system, and the twin in memory if ``beside``."""
    with tempfile.TemporaryDirectory() as folder:
        found = streaming.forecast_and_measured(folder, **run)
        twin = streaming.in_process("memory", folder, None, **run) if beside else {}
    refused = [side["refused"] for side in (found, twin) if "refused" in side]
    if refused:
        raise RuntimeError(f"a run without a ceiling was refused: {refused[0]}")
    forecast, one = found["forecast"], found["measured"]
    took = _middle(one)
    moved = [counted / max(system, 1) for counted, system in zip(one["counted"], one["system"], strict=True)]
    return {
        "forecast_s": forecast["seconds"], "trial_s": forecast["trial"], "measured_s": took, "binds": forecast["binds"],
        "waited": statistics.median(one["waited"][2:]) / took, "written": forecast["written"], "counted": moved,
        **({"memory_s": _middle(twin), "same": _same(one, twin)} if beside else {}),
    }  # fmt: skip


def paired(run: Mapping[str, Any], sides: Mapping[str, Mapping[str, Any]], first: bool) -> dict[str, Any]:
    """Seconds of a streamed step, and the share of it that waited, of two sides: {name: what each adds to the run}, in
    this order if ``first``, else in the other."""
    found: dict[str, Any] = {}
    for name in list(sides) if first else list(sides)[::-1]:
        with tempfile.TemporaryDirectory() as place:
            side = streaming.in_process("streamed", place, None, **run, **sides[name])
        if "refused" in side:
            raise RuntimeError(f"a run without a ceiling was refused: {side['refused']}")
        found |= {f"{name}_s": _middle(side), f"{name}_waited": statistics.median(side["waited"][2:]) / _middle(side)}
    return found


def _middle(side: Mapping[str, Any]) -> float:
    return float(statistics.median(side["seconds"][2:]))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["losses"] == other["losses"] and one["digest"] == other["digest"])


def ceiling(run: Mapping[str, Any], at_once: int = 1) -> dict[str, Any]:
    """``streaming.under_one_ceiling``, without the losses of each step."""
    with tempfile.TemporaryDirectory() as folder:
        found = streaming.under_one_ceiling(folder, at_once=at_once, **run)
    streamed, free = found["streamed"], found["memory"]
    return {
        "ceiling": found["ceiling"], "state": found["state"], "program": found["program"], "same": found["same"],
        "streamed_refused": streamed.get("refused", ""), "memory_refused": found["memory_under_it"].get("refused", ""),
        "step_s": _middle(streamed) if "seconds" in streamed and len(streamed["seconds"]) > 2 else None,
        "memory_s": _middle(free) if len(free["seconds"]) > 2 else None, "most": streamed.get("most"),
        "memory_most": free["most"],
    }  # fmt: skip


_FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "latency": latency, "rates": rates, "disk": disk, "cliff": cliff, "ahead": ahead, "product": product,
    "attention": attention, "recorded": recorded, "streamed": streamed, "paired": paired, "ceiling": ceiling,
}  # fmt: skip


# --- what the chapter measures ---
def products(full: bool, seed: int) -> list[dict[str, Any]]:
    """Products in blocks of 64; then of larger orders, without the naive one, in blocks of 256."""
    tasks = [dict(what="product", n=n, block=64, seed=seed) for n in ((256, 512, 1024) if full else (128, 256))]
    larger = (1024, 2048, 4096) if full else (256,)
    return tasks + [dict(what="product", n=n, block=256, seed=seed, ways=list(hierarchy.WAYS[1:])) for n in larger]


def sizes(full: bool) -> list[int]:
    """Bytes of the sets that latency is measured on: powers of two."""
    return [4 * KIB << k for k in range(19 if full else 13)]


def levels(full: bool, seed: int) -> list[dict[str, Any]]:
    """Latency on both kinds of pages, rates, and the disk at several sizes and depths."""
    steps = 1_000_000 if full else 50_000
    tasks = [dict(what="latency", sizes=sizes(full), huge=huge, steps=steps, seed=seed) for huge in (True, False)]
    tasks.append(dict(what="rates", sizes=[16 * KIB, 512 * KIB, 8 * MIB, 64 * MIB, 512 * MIB][: 5 if full else 3]))
    blocks = (4 * KIB, 64 * KIB, MIB, 4 * MIB) if full else (4 * KIB, 4 * MIB)
    return tasks + [dict(what="disk", nbytes=b, depth=d) for b in blocks for d in ((1, 4, 16) if full else (1,))]


def cliffs(full: bool) -> list[dict[str, Any]]:
    """Every point of the cliff."""
    ratios = (0.5, 0.9, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0) if full else (0.9, 1.1)
    return [
        dict(what="cliff", block=block, capacity=capacity if full else max(8, capacity // 16), ratio=ratio,
             trace=trace, policy=policy)
        for block, capacity in CAPACITY.items() for ratio in ratios
        for trace, policy in (WAYS if full else WAYS[:1] if ratio < 1 else (WAYS[0], WAYS[2], WAYS[3]))
    ]  # fmt: skip


def streams(full: bool) -> list[dict[str, Any]]:
    """Runs of the streamed trainer beside their forecast: tokens x layers x bits of the moments, and a wide layer; two
    with the gradients clipped by the norm of all."""
    codes: tuple[list[int] | None, ...] = (None, [4, 8])
    if not full:
        shape = dict(layers=2, hidden=64, seq=64, batch=1, steps=4, state=None, impl="reference")
        return [dict(what="streamed", beside=False, run=shape, turn=0)]
    base = dict(hidden=256, batch=1, steps=12, impl="auto")
    grid = [base | dict(seq=seq, layers=layers, state=state)
            for seq in (64, 128, 512) for layers in (8, 24) for state in codes]  # fmt: skip
    grid += [base | dict(hidden=512, seq=32, layers=12, state=state) for state in codes]
    again = [run for run in grid if run["seq"] in (32, 512)]  # these are compared in time
    again += [base | dict(seq=512, layers=layers, state=None, clip=1.0) for layers in (8, 24)]
    turns = [(run, 0) for run in grid] + [(run, 1) for run in again]
    return [dict(what="streamed", beside=run["seq"] != 64, run=run, turn=turn) for run, turn in turns]


def pages(full: bool) -> list[dict[str, Any]]:
    """Pairs of a wide layer's runs, through large pages and through small ones."""
    wide = dict(hidden=512, seq=32, layers=12, batch=1, steps=12, state=None, impl="auto")
    sides = {"large": {"large": True}, "small": {"large": False}}
    return [dict(what="paired", run=wide, sides=sides, first=k % 2 == 0, turn=k) for k in range(6 if full else 0)]


def codes(full: bool) -> list[dict[str, Any]]:
    """Pairs of runs with so few tokens that the drive binds, moments in fp32 and in 4 and 8 bits."""
    few = dict(hidden=1024, seq=8, layers=6, batch=1, steps=8, impl="auto")
    sides: dict[str, Any] = {"fp32": {"state": None}, "codes": {"state": [4, 8]}}
    return [dict(what="paired", run=few, sides=sides, first=k % 2 == 0, turn=k) for k in range(6 if full else 0)]


def ceilings(full: bool) -> list[dict[str, Any]]:
    """Runs under one limit, the smallest first."""
    if not full:
        return [dict(what="ceiling", run=dict(layers=32, hidden=128, seq=32, batch=1, steps=1), at_once=3)]
    depths = ((64, 6), (128, 6), (320, 20))  # layers and steps
    return [dict(what="ceiling", run=dict(layers=n, hidden=256, seq=128, batch=1, steps=k)) for n, k in depths]

"""How far a training step in bf16 on the CPU is from the speed of its products, and what brings it nearer.

    python -m tq.lab.mixed_step                                  GPT-2's 124 million with 4,096 words, 1,024 tokens
    python -m tq.lab.mixed_step --preset gpt2-355m --rounds 2

Each way runs in a process of its own, as memory that one keeps would serve the next; the ways take turns. In every
process the products of a feed-forward layer are timed between the steps, so that both see the same machine.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

from tq.lab.stats import quartiles
from tq.lab.timing import Spread, time_calls
from tq.lab.training_step import SHAPES, STEPS, Setting, products_per_s
from tq.train.allocator import keep_freed_memory
from tq.train.model import GPT, TrainConfig, Trainer, load

TOKENS, WARM = 1024, 3
# whether the model is compiled, and whether memory is kept
WAYS = {
    "plain": (False, False),
    "memory kept": (False, True),
    "compiled": (True, False),
    "compiled, memory kept": (True, True),
}


@dataclass(frozen=True)
class Row:
    """Of a way, a number a round. seconds: of a step, the median; used: share of the products' speed; ratios: its
    seconds over those of the plain way."""

    seconds: list[float]
    used: list[float]
    ratios: list[float]

    def spread(self, name: str) -> Spread:
        return Spread(*quartiles(getattr(self, name)))


def steps(way: str, preset: str, vocab: int, count: int = 5) -> tuple[float, float]:
    """(median seconds of a step, its share of the products' speed) in this process; ``count`` steps."""
    compiled, kept = WAYS[way]
    if kept and not keep_freed_memory():
        raise RuntimeError("this C library's malloc cannot keep memory")
    shape = replace(SHAPES[preset], vocab=vocab)
    setting = Setting(shape, TOKENS // shape.seq, torch.bfloat16)
    config = TrainConfig(STEPS, setting.sequences, lr=3e-4, warmup=0, autocast=torch.bfloat16, compile=compiled)
    run = Trainer(GPT(shape, 0), load("stdlib", max_bytes=2_000_000), config)
    seconds, peaks = [], []
    for number in range(WARM + count):
        taken = time_calls({"step": run.step}, 1, warmup=0)["step"][0]
        if number >= WARM:
            seconds.append(taken)
            peaks.append(products_per_s(setting, torch.bfloat16, 3))
    middle = quartiles(seconds)[1]
    return middle, shape.flops_per_token() * setting.tokens / middle / quartiles(peaks)[1]


def measure(preset: str, vocab: int = 4096, rounds: int = 3, progress: bool = True) -> dict[str, Row]:
    """All ways, ``rounds`` processes each."""
    if preset not in SHAPES or SHAPES[preset].seq > TOKENS or rounds < 1:
        raise ValueError(f"preset must be one of {', '.join(SHAPES)} and rounds positive, got {preset!r}, {rounds}")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    turns = [way for _ in range(rounds) for way in WAYS]
    for way in tqdm(turns, unit="process", disable=not progress, dynamic_ncols=True):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found[way].append(pool.submit(steps, way, preset, vocab).result())
    base = [seconds for seconds, _ in found["plain"]]
    rows = {}
    for way, pairs in found.items():
        seconds, used = ([pair[i] for pair in pairs] for i in (0, 1))
        rows[way] = Row(seconds, used, [a / b for a, b in zip(seconds, base, strict=True)])
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.lab.mixed_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(SHAPES), default="gpt2-124m", help="shape of the model (gpt2-124m)")
    parser.add_argument("--vocab", type=int, default=4096, help="tokens that it knows, 256 or more (4096)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way (3)")
    given: Any = parser.parse_args(arguments)
    if given.vocab < 256 or given.rounds < 1:
        parser.error(f"--vocab must be at least 256 and --rounds positive, got {given.vocab} and {given.rounds}")
    for way, row in measure(given.preset, given.vocab, given.rounds).items():
        time, used, ratio = (row.spread(name) for name in ("seconds", "used", "ratios"))
        print(f"{way:24s} {time.median:6.2f} s a step, {used.median:4.0%} of the products, {ratio.median:.2f} of plain")


if __name__ == "__main__":
    main()

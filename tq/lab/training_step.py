"""A whole training step with codes in it, way beside way: what each costs in time, and what it keeps for backward.

    python -m tq.lab.training_step                                  25 million parameters, 1,024 tokens per step
    python -m tq.lab.training_step --preset gpt2-124m --vocab 4096 --ways plain

The ways take turns in one process, in another order each time, so ratios hold for this machine on this day, with their
quartiles. A step is the whole of it: batch, forward, backward, norm and clipping of the gradient, optimizer. What is
not compared: losses, and links between machines (the hook of one rank codes and decodes both phases and sends nobody
anything).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from tq.lab.stats import quartiles
from tq.lab.timing import Spread, time_calls
from tq.quant.codec import Codec
from tq.train.activations import BITS, EXACT, RECOMPUTE, compress_activations
from tq.train.experiments.ranks import ParallelTrainer
from tq.train.model import GPT, PRESETS, TrainConfig, Trainer, load
from tq.train.model.corpus import Corpus
from tq.train.model.gpt import GPTConfig
from tq.train.optim import TurboQuantAdamW
from tq.train.recompute import CodedResults

SHAPES = {"25m": GPTConfig(layers=8, hidden=512, heads=8, vocab=256, seq=256)} | PRESETS
BASE, DDP = "plain", "DDP, fp32"
FASTER = 1.2  # times that products in bfloat16 must be faster than in fp32 to be taken
STEPS = 1_000_000  # of a schedule that is never done
Step = Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """What is trained. autocast: None is plain fp32."""

    shape: GPTConfig
    sequences: int
    autocast: torch.dtype | None = None
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        return self.sequences * self.shape.seq

    def trainer(self, corpus: Corpus, **options: Any) -> Trainer:
        return Trainer(GPT(self.shape, 0), corpus, self.config, self.device, **options)

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(STEPS, self.sequences, lr=3e-4, warmup=0, autocast=self.autocast)


@dataclass(frozen=True)
class Row:
    """A way. times: seconds of each turn; ratios: those over the times of ``over`` in the same turn; kept: bytes for
    backward, where that differs."""

    name: str
    over: str
    times: list[float]
    ratios: list[float]
    kept: int | None

    @property
    def seconds(self) -> Spread:
        return Spread(*quartiles(self.times))

    @property
    def ratio(self) -> Spread:
        return Spread(*quartiles(self.ratios))


@contextmanager
def blocks_again(model: GPT, **options: Any) -> Iterator[None]:
    """Every block of a model is run again in backward; options: of ``torch.utils.checkpoint.checkpoint``."""
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class Way(NamedTuple):
    """What a step keeps for backward. coded: arguments of ``compress_activations``; None: nothing is coded.

    again: blocks are run again; products: but not their products, which are kept in 4 bits.
    """

    coded: dict[str, Any] | None = None
    again: bool = False
    products: bool = False


FOUR = dict.fromkeys(BITS, 4)
ACTIVATIONS = {
    BASE: Way(),
    "activations in 4 bits": Way(dict(bits=FOUR)),
    "4 bits, cheap results again": Way(dict(bits=FOUR, recompute=RECOMPUTE)),
    "mixed bits, cheap results again": Way(dict(recompute=RECOMPUTE)),
    "checkpoint of every block": Way(again=True),
    "checkpoint, inputs in 4 bits": Way(dict(bits=FOUR), again=True),
    "checkpoint, products in 4 bits": Way(again=True, products=True),
    "checkpoint, products and inputs in 4 bits": Way(dict(bits=FOUR), again=True, products=True),
}


class Activations:
    """Steps of one trainer that keep different things for backward; by the names of ``ACTIVATIONS``."""

    def __init__(self, run: Trainer) -> None:
        self.run, self.results = run, CodedResults()
        self.contexts: dict[str, AbstractContextManager[Any]] = {
            name: compress_activations(**way.coded) for name, way in ACTIVATIONS.items() if way.coded
        }
        self.ways: dict[str, Step] = {name: partial(self._step, name) for name in ACTIVATIONS}

    def _again(self, name: str) -> AbstractContextManager[None]:
        """What runs blocks again, if the way does."""
        way = ACTIVATIONS[name]
        options = {"context_fn": self.results} if way.products else {}
        return blocks_again(self.run.model, **options) if way.again else nullcontext()

    def _step(self, name: str) -> None:
        plain = self.run.forward

        def forward(*batch: Any) -> Any:
            with self.contexts.get(name, nullcontext()), self._again(name):
                return plain(*batch)

        self.run.forward = forward
        try:
            self.run.step()
        finally:
            self.run.forward = plain

    def kept(self, name: str) -> int:
        """Bytes that a step keeps for backward, those of a block that is run again not among them."""
        before = self.results.kept_bytes
        with compress_activations(**ACTIVATIONS[name].coded or {"bits": EXACT}) as report, self._again(name):
            self.run.loss(0)
        return report.bytes_after + self.results.kept_bytes - before


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW of this package": {"variant": "exact"},
    "gradients exchanged in 4 bits": {"warmup": 0},
    "AdamW's state in (4, 8) bits": {"variant": "exact", "state": (4, 8)},
}
HOOKS = {DDP: None, "DDP, hook of 4 bits": Codec()}
WAYS = (*ACTIVATIONS, *OPTIMIZERS, *HOOKS)


def optimizers(setting: Setting, corpus: Corpus) -> dict[str, Step]:
    """Steps with ours in the place of PyTorch's AdamW; one rank codes what it would have sent."""
    return {
        name: setting.trainer(corpus, optimizer=partial(TurboQuantAdamW, **options)).step
        for name, options in OPTIMIZERS.items()
    }


def hooks(setting: Setting, corpus: Corpus) -> dict[str, Step]:
    """Steps under ``DistributedDataParallel`` of one rank, whose process group must be there."""
    return {
        name: ParallelTrainer(GPT(setting.shape, 0), corpus, setting.config, codec=codec, device=setting.device).step
        for name, codec in HOOKS.items()
    }


def products_per_s(setting: Setting, dtype: torch.dtype, repeats: int = 7) -> float:
    """Floating-point operations per second of the products of a feed-forward layer, the median."""
    shape = setting.shape
    x = torch.randn(setting.tokens, shape.hidden, dtype=dtype, device=setting.device)
    w = torch.randn(shape.hidden, shape.ffn_width, dtype=dtype, device=setting.device)
    seconds = time_calls({"product": lambda: torch.mm(x, w)}, repeats, warmup=2, inner=4)["product"]
    return 2 * x.numel() * shape.ffn_width / quartiles(seconds)[1]


def fitting_autocast(setting: Setting) -> torch.dtype | None:
    """bfloat16 where products are faster in it than in fp32, as with AMX or on a GPU; else None."""
    fast, plain = (products_per_s(setting, dtype, 3) for dtype in (torch.bfloat16, torch.float32))
    return torch.bfloat16 if fast > FASTER * plain else None


def measure(setting: Setting, names: Collection[str] = WAYS, repeats: int = 7, progress: bool = True) -> dict[str, Row]:
    """Times some of ``WAYS``, and what they are compared with. Makes a process group of one rank if there is none."""
    if unknown := set(names) - set(WAYS):
        raise ValueError(f"names must be among {', '.join(WAYS)}, got {sorted(unknown)}")
    corpus = load("stdlib", max_bytes=2_000_000)
    activations = Activations(setting.trainer(corpus))
    chosen = {BASE, *names} | ({DDP} if set(HOOKS) & set(names) else set())
    alone = not dist.is_initialized()
    if alone:
        backend = "nccl" if setting.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        calls = dict(activations.ways)
        for kind, made in ((OPTIMIZERS, optimizers), (HOOKS, hooks)):
            calls |= made(setting, corpus) if chosen & set(kind) else {}
        calls = {name: call for name, call in calls.items() if name in chosen}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        orders = random.Random(0)
        for turn in tqdm(range(repeats + 1), unit="turn", disable=not progress, dynamic_ncols=True):
            order = orders.sample([*calls], len(calls))  # else each would follow the same other one always
            for name, seconds in time_calls({name: calls[name] for name in order}, 1, warmup=0).items():
                samples[name] += seconds if turn else []  # the first turn warms up
    finally:
        if alone:
            dist.destroy_process_group()
    return {name: _row(name, samples, activations) for name in calls}


def _row(name: str, samples: Mapping[str, list[float]], activations: Activations) -> Row:
    over = DDP if name.startswith("DDP") else BASE
    ratios = [a / b for a, b in zip(samples[name], samples[over], strict=True)]
    kept = activations.kept(name) if name in activations.ways else None
    return Row(name, over, samples[name], ratios, kept)


def table(rows: Collection[Row], setting: Setting, peak: float) -> str:
    """The rows as text, below what they were measured on."""
    shape = setting.shape
    plain = next(row for row in rows if row.name == BASE)
    used = shape.flops_per_token() * setting.tokens / plain.seconds.median / peak
    kind = "fp32" if setting.autocast is None else str(setting.autocast).removeprefix("torch.")
    lines = [
        f"{shape.num_parameters / 1e6:.0f} million parameters, {setting.tokens} tokens per step, {kind}, "
        f"{torch.get_num_threads()} threads; a plain step takes {plain.seconds.median:.2f} s, {used:.0%} of the "
        f"products' peak of {peak / 1e12:.2f} TFLOP/s",
        f"{'way':34s} {'time over':>12s}   {'quartiles':>14s}   {'kept for backward':>20s}",
    ]
    for row in rows:
        kept = "" if row.kept is None else f"{row.kept / 1e6:8.1f} MB, {(plain.kept or 0) / row.kept:5.2f}x less"
        ratio = f"{row.ratio.median:6.3f} {row.over[:5]:>5s}   [{row.ratio.low:.3f}, {row.ratio.high:.3f}]"
        lines.append(f"{row.name:34s} {ratio}   {kept:>22s}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.lab.training_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(SHAPES), default="25m", help="shape of the model (25m)")
    parser.add_argument("--vocab", type=int, help="tokens that it knows, 256 or more (the preset's)")
    parser.add_argument("--sequences", type=int, help="per step (as many as make 1,024 tokens)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(cpu)")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto", help="auto: the faster here")
    parser.add_argument("--ways", default="", help="only those whose name holds this text (all)")
    parser.add_argument("--repeats", type=int, default=7, help="turns that count (7)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    given = parser.parse_args(arguments)
    shape = SHAPES[given.preset]
    if given.vocab is not None:
        if given.vocab < 256:
            parser.error(f"--vocab must be at least 256, got {given.vocab}")
        shape = dataclasses.replace(shape, vocab=given.vocab)
    if given.repeats < 1 or (given.sequences is not None and given.sequences < 1):
        parser.error(f"--repeats and --sequences must be positive, got {given.repeats} and {given.sequences}")
    setting = Setting(shape, given.sequences or max(1, 1024 // shape.seq), device=given.device)
    auto = given.precision == "auto"
    autocast = fitting_autocast(setting) if auto else {"fp32": None, "bf16": torch.bfloat16}[given.precision]
    setting = dataclasses.replace(setting, autocast=autocast)
    peak = products_per_s(setting, autocast or torch.float32)
    names = [name for name in WAYS if given.ways in name]
    rows = list(measure(setting, names, given.repeats, progress=not given.json).values())
    if given.json:
        print(json.dumps({"products_per_s": peak, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
    else:
        print(table(rows, setting, peak))


if __name__ == "__main__":
    main()

"""`python -m tq.economics`: what compression saves, what a run costs, when it pays. Nothing is fetched.

Exit codes: 0 done; 1 `prices --check` found a fault; 2 a wrong command line or input, said in one line.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import NoReturn

from tq.economics import calculator, energy, prices
from tq.economics.commands import COMMANDS
from tq.economics.terminal import run
from tq.systems import hardware
from tq.systems.efficiency import generations
from tq.systems.shape import PRESETS

EXAMPLES = """examples:
  python -m tq.economics savings
  python -m tq.economics savings --link-gbit 100 --overlap .3
  python -m tq.economics savings --baseline fp32 --zero 0 --codec-g 50 --link-gbit 25 --json
  python -m tq.economics memory --model llama2-70b --gpu h100-80gb --tp 8 --pp 4 --dp 8 --activation-bits 4
  python -m tq.economics cost --model llama2-70b --gpu h100-80gb --tp 8 --dp 32 --global-batch 1024 --tokens 1.4e12
  python -m tq.economics checkpoint --model llama2-70b --gpus 1024 --write-gb-s 50 --interval-min 30
  python -m tq.economics breakeven --share .04 .2 .55 --link 400 100 25 --overhead 1 1.2 2
  python -m tq.economics pareto --model llama2-7b --tokens 1e12 --gpus 64 128 --batch 512
  python -m tq.economics prices --gpu h100-80gb
  python -m tq.economics prices --check new.csv          then: prices --import new.csv

Every command takes --json. Without options `savings` answers for the reference job of the book. Prices are those of
data/prices.csv; the answer names their days, and stale ones come with a warning (--max-age-days).
"""


class Parser(argparse.ArgumentParser):
    """An error is one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (--help shows what is accepted)", file=sys.stderr)
        raise SystemExit(2)


# --- the command line -----------------------------------------------------------------------------------------


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a day such as 2026-11-09 is accepted, got {text!r}") from None


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[str], float]:
    """Converter of a finite number within [low, high], or (low, high] with open_low."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value if open_low else low <= value) or not value <= high:
            above = f"above {low:g}" if open_low else f"from {low:g}"
            raise argparse.ArgumentTypeError(f"a number {above} to {high:g} is accepted, got {text!r}")
        return value

    return convert


def _count(low: int, high: int) -> Callable[[str], int]:
    """Converter of a whole number within [low, high]."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise argparse.ArgumentTypeError(f"a whole number from {low} to {high} is accepted, got {shown!r}")
        return value

    return convert


# finite, and so far beyond any run that products of them stay finite
RATE, MONEY, TOKENS = (_number(0, most, open_low=True) for most in (1e6, 1e6, 1e18))
SIZE = _count(1, 10**9)


def _shape_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("model", "a published shape, or one of your own")
    group.add_argument("--model", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    for name in ("layers", "hidden", "heads", "vocab", "seq", "kv-heads", "ffn"):
        group.add_argument(f"--{name}", type=SIZE, metavar="N", help="also replaces that of --model")
    group.add_argument("--gated", action="store_true", default=None, help="gated MLP (SwiGLU), Llama style")


def _layout_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("layout")
    for name, default, what in (
        ("tp", 1, "tensor-parallel GPUs"), ("pp", 1, "pipeline stages"), ("dp", 1, "data-parallel replicas"),
        ("cp", 1, "context-parallel GPUs"), ("ep", 1, "expert-parallel GPUs, out of dp * cp"),
        ("micro-batch", 1, "sequences a micro-batch"), ("interleave", 1, "model chunks a stage"),
        ("zero", 1, "ZeRO stage, 0 to 3"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what}; default: {default}")
    group.add_argument("--global-batch", type=SIZE, metavar="N", help="sequences a step; default: 8 micro-batches each")
    group.add_argument("--recompute", choices=("none", "selective", "full"), default="selective")
    group.add_argument("--no-sequence-parallel", action="store_true", help="default: with it where --tp is above 1")
    group.add_argument("--software", choices=generations(), default="megatron-core", help="default: megatron-core")


def _price_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("prices")
    group.add_argument("--prices", type=Path, metavar="FILE", help="default: data/prices.csv")
    group.add_argument("--provider", help="one provider; default: the spread over all")
    group.add_argument("--kind", choices=prices.KINDS, default="on-demand", help="default: on-demand")
    group.add_argument("--as-of", type=_day, metavar="DAY", help="prices known on this day; default: today")
    group.add_argument(
        "--max-age-days",
        type=_count(0, 10**6),
        default=prices.MAX_AGE_DAYS,
        metavar="N",
        help=f"default: {prices.MAX_AGE_DAYS}",
    )


def _savings_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", metavar="NAME", help="its number of parameters replaces --parameters-b")
    command.add_argument("--baseline", choices=("bf16", "fp32"), help="replaces --base-bits")
    command.add_argument("--exactly", action="store_true", help="no ranges: every input is as given")
    for field in calculator.FIELDS["savings"]:
        what = f"{field.label}{f', {field.unit}' if field.unit else ''}; default: {field.default:g}".replace("%", "%%")
        command.add_argument(f"--{field.name.replace('_', '-')}", type=float, metavar="X", help=what)


def _memory_options(command: argparse.ArgumentParser) -> None:
    _shape_options(command)
    _layout_options(command)
    command.add_argument("--gpu", default="h100-80gb", help="default: h100-80gb")
    command.add_argument("--reserve-gib", type=_number(0, 1e6), default=6.0, metavar="X", help="kept free; default: 6")
    command.add_argument("--activation-bits", type=int, metavar="N", help="also with activations in so many bits")
    command.add_argument("--state-bits", type=int, metavar="N", help="also with both moments in so many bits")


def _cost_options(command: argparse.ArgumentParser) -> None:
    _shape_options(command)
    _layout_options(command)
    _price_options(command)
    command.add_argument("--gpu", default="h100-80gb", help="default: h100-80gb")
    what = f"one of {', '.join(hardware.tiers())}; default: what --provider states, else the GPU's own"
    command.add_argument("--network", metavar="TIER", help=what)
    command.add_argument("--tokens", type=TOKENS, required=True, metavar="X")
    command.add_argument("--price", type=MONEY, metavar="USD", help="an hour and GPU, in place of --prices")
    command.add_argument("--gradient-bits", type=int, metavar="N", help="also with gradients in so many bits")
    command.add_argument("--region", default="us", help=f"one of {', '.join(energy.regions())}; default: us")
    what = "count failures, at this speed of checkpoints"
    command.add_argument("--checkpoint-gb-s", type=RATE, metavar="X", help=what)
    samples, what = _count(2, 1_000_000), "of the Monte-Carlo; default: 10000"
    command.add_argument("--samples", type=samples, default=10_000, metavar="N", help=what)
    command.add_argument("--seed", type=_count(0, 2**32), default=0, metavar="N")


def _checkpoint_options(command: argparse.ArgumentParser) -> None:
    _shape_options(command)
    _price_options(command)
    command.add_argument("--parameters-b", type=RATE, metavar="X", help="billions of parameters, in place of a model")
    command.add_argument("--gpu", default="h100-80gb", help="of the price; default: h100-80gb")
    command.add_argument("--gpus", type=_count(1, 10**7), required=True, metavar="N")
    command.add_argument("--price", type=MONEY, metavar="USD", help="an hour and GPU, in place of --prices")
    positive = _number(0, 1e9, open_low=True)
    for name, default, what in (
        ("write-gb-s", None, "GB/s of the whole cluster to the place of its checkpoints"),
        ("bytes-per-parameter", 14.0, "bf16 weights, fp32 master copy and both fp32 moments; default: 14"),
        ("ratio", 1.0, "by which compression shrinks a checkpoint; default: 1"),
        ("restart-s", 600.0, "seconds from a failure to the first new step; default: 600"),
        ("lives-shape", 1.0, "Weibull shape of the times between failures; default: 1, exponential"),
        ("mtbf-h", None, "hours between failures of the cluster; default: Llama 3's rate"),
        ("interval-min", None, "minutes of work between two checkpoints; default: the best"),
    ):
        needed = name == "write-gb-s"
        command.add_argument(f"--{name}", type=positive, default=default, required=needed, metavar="X", help=what)


def _breakeven_options(command: argparse.ArgumentParser) -> None:
    shares = [0.04, 0.1, 0.2, 0.3, 0.55]
    what = "exposed data-parallel communication over the step, with bf16 on the reference link"
    command.add_argument("--share", type=_number(0, 0.999), nargs="+", default=shares, metavar="F", help=what)
    command.add_argument("--link", type=RATE, nargs="+", default=[400.0, 100.0, 25.0], metavar="GBIT")
    overheads = [1.0, 1.05, 1.2, 2.0]
    command.add_argument("--overhead", type=_number(1, 1e6), nargs="+", default=overheads, metavar="K")
    command.add_argument("--reference", type=RATE, default=400.0, metavar="GBIT", help="default: 400")
    command.add_argument("--baseline", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    command.add_argument("--bits", type=_count(1, 32), default=4, metavar="N", help="default: 4")
    command.add_argument("--block", type=SIZE, default=128, metavar="N", help="default: 128")


def _pareto_options(command: argparse.ArgumentParser) -> None:
    _shape_options(command)
    _price_options(command)
    command.add_argument("--tokens", type=TOKENS, required=True, metavar="X")
    command.add_argument("--batch", type=SIZE, default=1024, metavar="N", help="sequences a step; default: 1024")
    command.add_argument("--software", choices=generations(), default="megatron-core", help="default: megatron-core")
    sizes, what = [64, 128, 256, 512], "sizes of the cluster; default: 64 128 256 512"
    command.add_argument("--gpus", type=_count(1, 10**6), nargs="+", default=sizes, metavar="N", help=what)
    what = "only offers whose source states their network; default: else the GPU's usual port is assumed"
    command.add_argument("--stated-network", action="store_true", help=what)
    command.add_argument("--all", action="store_true", help="also the offers that are beaten")


def _prices_options(command: argparse.ArgumentParser) -> None:
    _price_options(command)
    command.add_argument("--gpu", help="only this GPU; default: all")
    command.add_argument("--storage", action="store_true", help="prices of storage instead")
    command.add_argument("--check", type=Path, metavar="FILE", help="say what is wrong with a snapshot")
    what = "add its rows to the file of prices"
    command.add_argument("--import", dest="take_in", type=Path, metavar="FILE", help=what)


#: What each command is for, what it leaves out, and its options.
OPTIONS: dict[str, tuple[str, str | None, Callable[[argparse.ArgumentParser], None]]] = {
    "savings": (
        "step time, cost and saving with compressed gradients",
        "The first calculator of the book's page: data-parallel traffic alone, on one flat network.",
        _savings_options,
    ),
    "memory": ("memory of a GPU by part, and the largest micro-batch", None, _memory_options),
    "cost": ("hours, dollars, electricity and carbon of a run", None, _cost_options),
    "checkpoint": (
        "how often to save, and what checkpoints and failures cost",
        "The exact renewal model of tq.systems.renewal; writing in the background is not modelled.",
        _checkpoint_options,
    ),
    "breakeven": ("savings over share, link and overhead", None, _breakeven_options),
    "pareto": (
        "offers that nobody beats in time and money",
        "Each cluster runs the fastest layout that fits; takes about a second for each GPU type and size.",
        _pareto_options,
    ),
    "prices": ("list prices, check a snapshot, take it in", None, _prices_options),
}


def parser() -> Parser:
    top = Parser(
        prog="python -m tq.economics",
        description="What training costs, and what compression of gradients and activations would save.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    every = Parser(add_help=False)
    every.add_argument("--json", action="store_true", help="print JSON")
    for name, (what, more, options) in OPTIONS.items():
        options(commands.add_parser(name, parents=[every], help=what, description=more))
    return top


def main(arguments: Sequence[str] | None = None, *, today: date | None = None) -> int:
    """today: None, the clock's."""
    given = parser().parse_args(arguments)
    if "as_of" in given and given.as_of is None:
        given.as_of = today or date.today()
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", prices.StalePrices)
        try:
            report = COMMANDS[given.command](given)
        except (ValueError, TypeError, FileNotFoundError) as error:
            print(f"python -m tq.economics {given.command}: {error}", file=sys.stderr)
            return 2
    stale = [str(each.message) for each in noted if issubclass(each.category, prices.StalePrices)]
    for text in dict.fromkeys(stale):
        print(f"python -m tq.economics {given.command}: warning: {text}", file=sys.stderr)
    for each in noted:
        if not issubclass(each.category, prices.StalePrices):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    answer = report.facts()
    print(json.dumps(answer, indent=1, allow_nan=False) if given.json else "\n".join(report.lines()))
    return 1 if answer.get("problems") else 0


if __name__ == "__main__":
    sys.exit(run(main))

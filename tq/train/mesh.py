"""Trains the small GPT, or a mixture of experts, under a plan on ranks of this machine; says which bytes went where.

    python -m tq.train.mesh --dp 2 --tp 2 --pp 2 --zero 2 --schedule 1f1b --micro 4
    python -m tq.train.mesh --pp 4 --micro 8 --schedule searched --passes 1 1.1 0.7 --hold 1.5
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from tq.systems.schedule_search import search
from tq.systems.schedules import Cost, one_f_one_b, simulate
from tq.train import chunks
from tq.train.crew import crew
from tq.train.model.gpt import GPTConfig
from tq.train.pipeline import SCHEDULES
from tq.train.split import PLACES, Job, Plan
from tq.train.traffic import counted

CONFIG = GPTConfig(layers=8, hidden=64, heads=8, vocab=256, seq=64)
MIXTURE = chunks.Mixture()
SEARCHED = "searched"
SIZES = {
    "dp": "replicas that see different sequences", "tp": "ranks that share every layer",
    "pp": "stages of a pipeline", "cp": "ranks that share a sequence", "ep": "ranks that share the experts",
    "zero": "0 to 3: what replicas split of optimizer state, gradients and weights",
    "replicas": "groups of replicas that each hold everything (HSDP)", "chunks": "stages of a pipeline per rank",
    "micro": "micro-batches of a step",
}  # fmt: skip
FLAGS = {
    "sequence": "split sequences between the layers too (with --tp)", "losses": "split the loss by words (with --tp)",
    "balanced": "give every rank an early and a late part of a sequence (with --cp)",
}  # fmt: skip


def found_order(plan: Plan, passes: list[float], hold: float) -> tuple[list[list[tuple[str, int, int]]], str]:
    """The schedule that the search finds for a plan, and what it says of it.

    Args:
        plan: its stages and micro-batches.
        passes: time of F, I and W of a micro-batch, in any unit.
        hold: micro-batches that a rank may hold at most, over the stages.

    Raises:
        ValueError: if there is no pipeline, ranks have several stages, or so few micro-batches cannot pass.
    """
    if plan.pp < 2 or plan.chunks > 1:
        raise ValueError(f"a searched schedule needs pp > 1 and one stage per rank; got {plan}")
    cost = Cost(*passes)
    order = search(plan.pp, plan.micro, cost, hold * plan.pp)
    ours, usual = (simulate(each, cost) for each in (order, one_f_one_b(plan.pp, plan.micro)))
    return [[(action.kind, action.stage, action.micro) for action in rank] for rank in order], (
        f"searched schedule: idle for {ours.bubble:.1%} of a step, holds {max(ours.in_flight):.1f} micro-batches "
        f"(1F1B: {usual.bubble:.1%}, {max(usual.in_flight):.1f}; simulated)"
    )


def train(
    folder: Path, plan: dict[str, Any], steps: int, sequences: int, searched: list[Any] | None = None
) -> dict[str, Any]:
    """On a rank of a crew: losses, bytes sent by operation in the last step, bytes held. searched: the last two
    arguments of ``found_order``."""
    made = Plan(**plan)
    order = None if searched is None else found_order(made, *searched)[0]
    job = Job(made, CONFIG, MIXTURE if made.ep > 1 else None, order=order)
    data = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    generator, losses, sent = torch.Generator().manual_seed(0), [], {}
    for step in range(steps):
        start = torch.randint(0, len(data) - CONFIG.seq - 1, (sequences,), generator=generator)
        tokens = torch.stack([data[s : s + CONFIG.seq + 1] for s in start.tolist()])
        if step == steps - 1:
            with counted() as traffic:
                loss = job.backward(tokens[:, :-1], tokens[:, 1:].contiguous())
                job.update()
            sent = traffic.table()
        else:
            loss = job.backward(tokens[:, :-1], tokens[:, 1:].contiguous())
            job.update()
        losses.append(job.mean_loss(loss))
    return {"losses": losses, "sent": sent, "held": job.held_bytes()}


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tq.train.mesh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in SIZES.items():
        default = 0 if name == "zero" else 1
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument("--schedule", default="1f1b", choices=[*SCHEDULES, SEARCHED], help="of the pipeline (1f1b)")
    for name, what in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    for place in PLACES:
        parser.add_argument(f"--{place}-bits", type=int, metavar="N", help=f"quantize {place}; fp32 by default")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="(20)")
    parser.add_argument("--sequences", type=int, default=16, metavar="N", help="of a global batch (16)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds (600)")
    only = parser.add_argument_group("of a searched schedule")
    passes = "time of a forward pass, and of a backward pass to inputs and to weights, in any unit (1 1 1)"
    usual = [1.0, 1.0, 1.0]
    only.add_argument("--passes", type=_positive, nargs=3, default=usual, metavar=("F", "I", "W"), help=passes)
    hold = "micro-batches that a rank may hold, over the stages: 1 as 1F1B does, 2 for hardly any idle time (2)"
    only.add_argument("--hold", type=_positive, default=2.0, metavar="X", help=hold)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 2 for a plan that contradicts itself."""
    given = vars(_parser().parse_args(arguments))
    bits = {place: given[f"{place}_bits"] for place in PLACES if given[f"{place}_bits"]}
    plan = {each.name: given[each.name] for each in fields(Plan) if each.name != "bits"} | {"bits": bits}
    searched = [given["passes"], given["hold"]] if given["schedule"] == SEARCHED else None
    plan["schedule"] = "own" if searched else given["schedule"]
    try:
        made = Plan(**plan)
        ranks = made.ranks
        if searched:
            print(found_order(made, *searched)[1])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    found = crew(
        "tq.train.mesh:train", ranks, given["timeout"], plan=plan, steps=given["steps"],
        sequences=given["sequences"], searched=searched,
    )  # fmt: skip
    losses = found[0]["losses"]
    print(f"{ranks} ranks, {len(losses)} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f} nats")
    print("bytes that a rank sends in a step (least ... most over the ranks):")
    for key in sorted({key for each in found for key in each["sent"]}):
        sizes = [each["sent"].get(key, 0.0) for each in found]
        name, _, group = key.rpartition(" ")
        print(f"  {name:15} over {group:>2} ranks  {min(sizes):14,.0f} ... {max(sizes):14,.0f}")
    print("bytes that a rank holds:", {k: f"{max(e['held'][k] for e in found):,}" for k in found[0]["held"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())

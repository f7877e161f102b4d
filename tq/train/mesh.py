"""Trains the small GPT, or a mixture of experts, under a plan on ranks of this machine; says which bytes went where.

    python -m tq.train.mesh --dp 2 --tp 2 --pp 2 --zero 2 --schedule 1f1b --micro 4
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from tq.train import chunks
from tq.train.crew import crew
from tq.train.model.gpt import GPTConfig
from tq.train.pipeline import SCHEDULES
from tq.train.split import PLACES, Job, Plan
from tq.train.traffic import counted

CONFIG = GPTConfig(layers=8, hidden=64, heads=8, vocab=256, seq=64)
MIXTURE = chunks.Mixture()


def train(folder: Path, plan: dict[str, Any], steps: int, sequences: int, order: Any = None) -> dict[str, Any]:
    """On a rank of a crew: losses, bytes sent by operation in the last step, bytes held."""
    made = Plan(**plan)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tq.train.mesh", description=__doc__)
    for name in ("dp", "tp", "pp", "cp", "ep", "zero", "replicas", "chunks", "micro"):
        parser.add_argument(f"--{name}", type=int, default=0 if name == "zero" else 1)
    parser.add_argument("--schedule", default="1f1b", choices=[*SCHEDULES])
    for name in ("sequence", "losses", "balanced"):
        parser.add_argument(f"--{name}", action="store_true")
    for place in PLACES:
        parser.add_argument(f"--{place}-bits", type=int, help="quantize here; fp32 by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=16, help="of a global batch")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 2 for a plan that contradicts itself."""
    given = vars(_parser().parse_args(arguments))
    bits = {place: given[f"{place}_bits"] for place in PLACES if given[f"{place}_bits"]}
    plan = {each.name: given[each.name] for each in fields(Plan) if each.name != "bits"} | {"bits": bits}
    try:
        ranks = Plan(**plan).ranks
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    found = crew(
        "tq.train.mesh:train", ranks, given["timeout"], plan=plan, steps=given["steps"],
        sequences=given["sequences"],
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

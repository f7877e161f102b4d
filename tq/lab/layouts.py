"""Is a split model the same model? Losses, gradients, bytes by operation and bytes held, against one process.

``proof`` runs on every rank of a crew; ``prove`` starts one. A fault can be planted: the same check must find it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tq.lab import layout_bytes
from tq.lab.layout_framing import Calls, private_network, quiet_interface
from tq.systems.schedule_search import search
from tq.systems.schedules import Cost, zb_h2
from tq.train import chunks
from tq.train.crew import crew
from tq.train.model.gpt import GPTConfig
from tq.train.split import Job, Plan

LOSS_TOLERANCE = 2e-6  # of the loss after five steps, in nats
GRADIENT_TOLERANCE = 5e-6  # relative, of the first step's gradients
STEPS, SEQUENCES, LR = 5, 16, 1e-3
CONFIG = GPTConfig(layers=8, hidden=64, heads=8, vocab=256, seq=64)
MIXTURE = chunks.Mixture(experts=8, chosen=2, width=128)


def plans(ranks: int) -> dict[str, Plan]:
    """Layouts of 2, 4 or 8 ranks, by name; those of several axes need 4 or 8."""
    n, half, micro = ranks, ranks // 2, ranks
    found = {
        "DP": Plan(dp=n),
        "ZeRO-1": Plan(dp=n, zero=1),
        "ZeRO-2": Plan(dp=n, zero=2),
        "ZeRO-3": Plan(dp=n, zero=3),
        "TP": Plan(tp=n),
        "TP + SP": Plan(tp=n, sequence=True),
        "TP + loss-parallel": Plan(tp=n, losses=True),
        "PP, GPipe": Plan(pp=n, micro=micro, schedule="gpipe"),
        "PP, 1F1B": Plan(pp=n, micro=micro, schedule="1f1b"),
        "PP, ZB-H2": Plan(pp=n, micro=micro, schedule="own"),
        "PP, searched": Plan(pp=n, micro=micro, schedule="own"),
        "EP": Plan(dp=n, ep=n),
        "CP": Plan(cp=n),
        "CP, balanced": Plan(cp=n, balanced=True),
    }
    if ranks >= 4:
        found |= {
            "HSDP": Plan(dp=n, zero=3, replicas=2),
            "PP, interleaved": Plan(pp=half, dp=2, micro=half, schedule="interleaved", chunks=2),
            "PP, looped BFS": Plan(pp=half, dp=2, micro=half, schedule="looped-bfs", chunks=2),
            "PP, ZB1P": Plan(pp=half, dp=2, micro=half, schedule="zb1p", chunks=2),
            "PP, ZBV": Plan(pp=half, dp=2, micro=half, schedule="zbv", chunks=2),
            "PP, DualPipeV": Plan(pp=half, dp=2, micro=micro, schedule="dualpipev", chunks=2),
        }
    if ranks >= 8:
        found |= {
            "PP x FSDP x TP": Plan(pp=2, dp=2, tp=2, zero=2, sequence=True, micro=4),
            "PP x FSDP x TP, ZBV": Plan(pp=2, dp=2, tp=2, zero=2, sequence=True, micro=4, schedule="zbv", chunks=2),
            "PP x TP x EP": Plan(pp=2, dp=2, tp=2, ep=2, micro=4),
            "FSDP x CP": Plan(dp=2, cp=4, zero=3, balanced=True),
        }
    return found


FAULTS = {"a missing all-reduce": "TP", "an unscaled micro-batch": "PP, 1F1B", "no mean over data ranks": "PP, ZBV"}


def own_order(name: str, plan: Plan) -> Any:
    """The order of layouts whose schedule is ours; None for PyTorch's."""
    if plan.schedule != "own":
        return None
    if name == "PP, ZB-H2":
        return zb_h2(plan.pp, plan.micro)
    cost = Cost(1.0, 1.1, 0.7, 0.05)  # unequal, so that the found order is no book's
    return search(plan.pp, plan.micro, cost, 1.5 * plan.pp)


def batches(steps: int, vocab: int, seq: int, sequences: int = SEQUENCES) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches of random tokens and the tokens after them."""
    generator = torch.Generator().manual_seed(1234)
    for _ in range(steps):
        tokens = torch.randint(0, vocab, (sequences, seq + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def reference(mixture: chunks.Mixture | None, config: GPTConfig, steps: int) -> dict[str, Any]:
    """Losses of one process before each step and after the last, and the first gradients by name."""
    gpt = chunks.model(config, 0, mixture)
    whole = chunks.Chunk(gpt, 0, config.layers)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LR)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for tokens, targets in batches(steps + 1, config.vocab, config.seq):
        optimizer.zero_grad()
        loss = chunks.loss_of(whole(tokens), targets)
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
        optimizer.step()
    return {"losses": losses, "gradients": gradients}


def _reference(folder: Path, mixture: chunks.Mixture | None, config: GPTConfig, steps: int) -> dict[str, Any]:
    """Made once by rank 0, read by all."""
    file = folder / f"reference-{mixture is not None}-{steps}.pt"
    if dist.get_rank() == 0 and not file.exists():
        torch.save(reference(mixture, config, steps), file)
    dist.barrier()
    found: dict[str, Any] = torch.load(file)
    return found


def gradient_error(job: Job, wanted: dict[str, Tensor]) -> float:
    """Largest error of a gradient over all ranks, relative to the gradient's norm; inf where one is missing."""
    worst = 0.0
    for name, parameter in job.named():
        gradient = parameter.grad
        if gradient is None:
            worst = float("inf")
            continue
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        target = wanted[name]
        if job.plan.ep > 1 and name.endswith(("mlp.up", "mlp.down")):
            each = len(target) // job.plan.ep
            target = target[job.own["dp"] * each : (job.own["dp"] + 1) * each]
        worst = max(worst, float((whole - target).norm() / target.norm().clamp(min=1e-12)))
    found = torch.tensor(worst if worst == worst else float("inf"), dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _plant(job: Job, fault: str) -> None:
    """Breaks a layout as a careless author would."""
    if fault == "a missing all-reduce":
        block = next(iter(job.parts[0].blocks.values()))
        for hook in list(block.mlp.down._forward_hooks):  # type: ignore[union-attr]
            del block.mlp.down._forward_hooks[hook]  # type: ignore[union-attr]
        block.mlp.down.register_forward_hook(  # type: ignore[union-attr]
            lambda module, inputs, out: out.to_local() if isinstance(out, DTensor) else out
        )
    elif fault == "an unscaled micro-batch":
        job.run.scale_grads = False  # type: ignore[union-attr]
    elif fault == "no mean over data ranks":
        job._average = lambda: None  # type: ignore[method-assign]
    else:
        raise ValueError(f"fault must be one of {', '.join(FAULTS)}, got {fault!r}")


def measure(
    folder: Path, name: str, plan: Plan, steps: int, fault: str | None = None, config: GPTConfig = CONFIG
) -> dict[str, Any]:
    """One layout on this rank's group: errors against one process, bytes sent in the last step, bytes held. At least
    two steps: DDP tells all ranks the order of its buckets once, in the second one. "wire" is what all ranks together
    sent in that step at the interface, headers included; it means something in a private network."""
    mixture = MIXTURE if plan.ep > 1 else None
    wanted = _reference(folder, mixture, config, steps)
    job = Job(plan, config, mixture, lr=LR, order=own_order(name, plan))
    if fault:
        _plant(job, fault)
    losses, error, sent, calls, off_rank, wire = [], 0.0, {}, [], 0, 0
    for number, (tokens, targets) in enumerate(batches(steps + 1, config.vocab, config.seq)):
        before = [quiet_interface(), quiet_interface()] if number == steps else []  # their difference: the looking
        with Calls() if number == steps else contextlib.nullcontext() as traffic:
            loss = job.backward(tokens, targets)
            if number == 0:
                error = gradient_error(job, wanted["gradients"])
            job.update()
        wire = quiet_interface() - before[1] - (before[1] - before[0]) if before else 0
        losses.append(job.mean_loss(loss))
        if traffic is not None:
            sent, calls = traffic.table(), traffic.listed()
            off_rank = sum(getattr(b.mlp, "off_rank", 0) for part in job.parts for b in part.blocks.values())
    return {
        "loss": abs(losses[-1] - wanted["losses"][-1]),
        "gradients": error,
        "sent": sent,
        "calls": calls,
        "formula": layout_bytes.sent(job, SEQUENCES),
        "off_rank": off_rank,
        "wire": wire,
        "held": job.held_bytes(),
        "held_formula": layout_bytes.held(job),
        "last": losses[-1],
    }


def proof(folder: Path, names: Sequence[str], steps: int = STEPS, faults: Sequence[str] = ()) -> dict[str, Any]:
    """On a rank of a crew: every named layout, then every named fault."""
    found, known = {}, plans(dist.get_world_size())
    for name in names:
        found[name] = measure(folder, name, known[name], steps)
    for fault in faults:
        found[fault] = measure(folder, FAULTS[fault], known[FAULTS[fault]], steps, fault)
    return found


def prove(
    ranks: int = 8, names: Sequence[str] | None = None, steps: int = STEPS, faults: Sequence[str] = tuple(FAULTS),
    timeout_s: float = 900.0, prefix: Sequence[str] = (),
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """{layout or fault: what each rank found}.

    Args:
        ranks: 2, 4 or 8 processes of this machine.
        names: of ``plans``; None means all.
        steps: of AdamW after which losses are compared.
        faults: of ``FAULTS``.
        timeout_s: seconds after which the crew is stopped.
        prefix: of the crew's command, as ``private_network`` gives it.
    """
    names = list(plans(ranks)) if names is None else list(names)
    found = crew("tq.lab.layouts:proof", ranks, timeout_s, prefix, names=names, steps=steps, faults=list(faults))
    return {name: [each[name] for each in found] for name in [*names, *faults]}


def passes(found: Sequence[dict[str, Any]]) -> bool:
    """Whether a layout is the model of one process, on all ranks."""
    return all(f["loss"] <= LOSS_TOLERANCE and f["gradients"] <= GRADIENT_TOLERANCE for f in found)


def on_the_wire(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Bytes at the interface beside those that gloo must send, of all ranks: payload, and every reduce-scatter once
    more, which gloo runs as an all-reduce."""
    payload = sum(sum(each["sent"].values()) for each in ranks)
    again = sum(v for each in ranks for key, v in each["sent"].items() if key.startswith("reduce-scatter"))
    return {"payload": payload, "gloo": payload + again, "interface": float(ranks[0]["wire"])}


def proved(task: dict[str, Any], device: str = "cpu") -> dict[str, dict[str, Any]]:
    """{layout or fault: what the check says}, the worst over the ranks.

    Args:
        task: ranks, names, steps and faults, as ``prove`` takes them.
        device: "cpu".
    """
    found, alone = {}, private_network()
    for name, ranks in prove(**task, prefix=alone).items():
        largest = max(ranks, key=lambda each: sum(each["sent"].values()))
        found[name] = {
            "passes": passes(ranks),
            "loss": max(each["loss"] for each in ranks),
            "gradients": max(each["gradients"] for each in ranks),
            "has_formula": bool(ranks[0]["formula"]),
            "bytes_agree": all(layout_bytes.agree(each) for each in ranks),
            "held_agree": all(each["held"] == each["held_formula"] for each in ranks),
            "sent": sum(largest["sent"].values()),
            "by": largest["sent"],
            "wire": on_the_wire(ranks) if alone else None,
            "calls": [each["calls"] for each in ranks],
            "held": {kind: max(each["held"][kind] for each in ranks) for kind in ranks[0]["held"]},
        }
    return found


if __name__ == "__main__":
    import sys

    print(json.dumps(prove(int(sys.argv[1]), sys.argv[2:] or None), indent=1))

"""What a codec costs at each place of a split model: paired runs on real ranks, with and without it, bytes, and steps
on a slow link."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.lab.net.crew import Crew
from tq.lab.net.hosts import Lab, obstacle
from tq.train import chunks
from tq.train.crew import crew
from tq.train.model.corpus import load
from tq.train.model.gpt import GPTConfig
from tq.train.split import Job, Plan
from tq.train.traffic import counted

CONFIG = GPTConfig(layers=4, hidden=128, heads=4, vocab=256, seq=64)
MIXTURE = chunks.Mixture(experts=4, chosen=2, width=256)
SEQUENCES, LR, WARM_UP = 16, 2e-3, 10
#: For each place of ``tq.train.split.PLACES`` the layout of two ranks that has it.
WHERE: dict[str, dict[str, Any]] = {
    "gradients": {"dp": 2, "zero": 2},
    "weights": {"dp": 2, "zero": 2},
    "tensor": {"tp": 2},
    "forward": {"pp": 2, "micro": 2},
    "backward": {"pp": 2, "micro": 2},
    "experts": {"dp": 2, "ep": 2},
}


def _batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    start = torch.randint(0, len(data) - CONFIG.seq - 1, (SEQUENCES,), generator=generator)
    tokens = torch.stack([data[s : s + CONFIG.seq + 1] for s in start.tolist()]).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _trained(place: str, bits: int | None, seed: int, steps: int, data: Tensor) -> dict[str, Any]:
    plan = Plan(**WHERE[place], bits={} if bits is None else {place: bits})
    job = Job(plan, CONFIG, MIXTURE if plan.ep > 1 else None, seed=seed, lr=LR)
    generator, sent = torch.Generator().manual_seed(seed), {}
    for step in range(steps):
        if step == 1:
            with counted() as traffic:
                job.backward(*_batch(data, generator))
            sent = traffic.table()
        else:
            job.backward(*_batch(data, generator))
        job.update()
    return {"loss": _held_out(job, data), "sent": sent}


def _held_out(job: Job, data: Tensor) -> float:
    """Mean loss of eight batches, the same for all runs."""
    generator, losses = torch.Generator().manual_seed(10_000), []
    for _ in range(8):
        losses.append(job.mean_loss(job.backward(*_batch(data, generator))))
    return sum(losses) / len(losses)


def _data() -> Tensor:
    return torch.as_tensor(load("stdlib", max_bytes=1_000_000).train)


def on_rank(folder: Path, places: list[str], bits: list[int], seed: int, steps: int) -> dict[str, Any]:
    """On a rank of a crew: one run without a codec, and one of each place and width."""
    data = _data()
    found: dict[str, Any] = {"fp32": _trained(places[0], None, seed, steps, data)}
    for place in places:
        found[place] = {str(b): _trained(place, b, seed, steps, data) for b in bits}
    return found


def _summed(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Bytes by operation over all ranks."""
    return {key: sum(each.get(key, 0.0) for each in ranks) for key in {key for each in ranks for key in each}}


def _times(place: str, before: dict[str, float], after: dict[str, float]) -> float:
    """How many times fewer bytes the place itself sends; what the layout sends elsewhere is left out."""
    if place == "gradients":  # codes travel by an all-to-all and are summed where they arrive
        return before["reduce-scatter 2"] / after["all-to-all 2"]
    if place == "tensor":  # codes travel as messages; the sums at both ends of the model stay in fp32
        return (before["all-reduce 2"] - after["all-reduce 2"]) / after["send 2"]
    if place in ("forward", "backward"):  # the other direction stays in fp32
        return before["send 2"] / 2 / (after["send 2"] - before["send 2"] / 2)
    operation = {"weights": "all-gather 2", "experts": "all-to-all 2"}[place]
    return before[operation] / after[operation]


def together() -> list[list[str]]:
    """Places of the same layout, which share the run without a codec."""
    groups: list[list[str]] = []
    for place, layout in WHERE.items():
        twin = next((group for group in groups if WHERE[group[0]] == layout), None)
        groups.append([place]) if twin is None else twin.append(place)
    return groups


def gaps(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """{"fp32": loss in nats without a codec, place: {"gap": nats by width, "times_fewer": bytes saved by width}}.

    Args:
        task: places (of ``WHERE``, with the same layout), bits (a list), seed, steps.
        device: "cpu".

    Raises:
        ValueError: if the layouts of the places differ.
    """
    if any(WHERE[place] != WHERE[task["places"][0]] for place in task["places"]):
        raise ValueError(f"places must have the same layout, got {task['places']}")
    found = crew("tq.lab.layout_gaps:on_rank", 2, 900.0, **task)
    before, fp32 = _summed([each["fp32"]["sent"] for each in found]), found[0]["fp32"]["loss"]
    result: dict[str, Any] = {"fp32": fp32}
    for place in task["places"]:
        sent = {b: _summed([each[place][b]["sent"] for each in found]) for b in found[0][place]}
        result[place] = {
            "gap": {b: each["loss"] - fp32 for b, each in found[0][place].items()},
            "times_fewer": {b: _times(place, before, each) for b, each in sent.items()},
        }
    return result


def rate(step: int, steps: int) -> float:
    """Learning rate of continued training: half of the full one, after a short rise, and a fall in a line to zero."""
    return LR / 2 * min(1.0, (step + 1) / WARM_UP, 2 * (1 - step / steps))


def _begun(mixture: chunks.Mixture | None, seed: int, steps: int, data: Tensor) -> dict[str, Tensor]:
    """Weights of one process in fp32 after so many steps."""
    gpt = chunks.model(CONFIG, seed, mixture)
    whole = chunks.Chunk(gpt, 0, CONFIG.layers)
    optimizer, generator = torch.optim.AdamW(whole.parameters(), lr=LR), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens, targets = _batch(data, generator)
        optimizer.zero_grad()
        chunks.loss_of(whole(tokens), targets).backward()
        optimizer.step()
    return dict(gpt.state_dict())


def _continued(place: str, bits: int | None, seed: int, steps: int, data: Tensor, start: dict[str, Tensor]) -> float:
    plan = Plan(**WHERE[place], bits={} if bits is None else {place: bits})
    job = Job(plan, CONFIG, MIXTURE if plan.ep > 1 else None, lr=LR, start=start)
    generator = torch.Generator().manual_seed(1000 + seed)
    for step in range(steps):
        for group in job.optimizer.param_groups:
            group["lr"] = rate(step, steps)
        job.backward(*_batch(data, generator))
        job.update()
    return _held_out(job, data)


def on_rank_continued(folder: Path, bits: int, seed: int, before: int, steps: int) -> dict[str, Any]:
    """On a rank of a crew: {place: loss with a codec less that without}, all places, from weights of one process."""
    data, starts = _data(), {}
    found: dict[str, float] = {}
    for mixture in (None, MIXTURE):
        file = folder / f"start-{mixture is not None}.pt"
        if dist.get_rank() == 0:
            torch.save(_begun(mixture, seed, before, data), file)
        dist.barrier()
        starts[mixture is not None] = torch.load(file)
    for group in together():
        start = starts["ep" in WHERE[group[0]]]
        fp32 = _continued(group[0], None, seed, steps, data, start)
        found |= {place: _continued(place, bits, seed, steps, data, start) - fp32 for place in group}
        found["fp32 " + group[0]] = fp32
    return found


def continued(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """{place: loss gap in nats of training that goes on from weights of one process, "fp32 " and a place: the loss}.

    A run from fresh weights ends where chance leads it: two of one seed that differ in rounding end 0.03 nats apart.
    From trained weights, at a learning rate that falls to zero, such pairs stay together, and a small gap can be seen.

    Args:
        task: bits, seed, before (steps of one process), steps (with and without the codec).
        device: "cpu".
    """
    found: dict[str, Any] = crew("tq.lab.layout_gaps:on_rank_continued", 2, 1800.0, **task)[0]
    return found


def step_seconds(place: str, bits: int | None, steps: int) -> list[float]:
    """On a rank of a laboratory's crew: seconds of each training step after the first."""
    torch.set_num_threads(1)
    plan = Plan(**WHERE[place], bits={} if bits is None else {place: bits})
    job = Job(plan, CONFIG, MIXTURE if plan.ep > 1 else None, lr=LR)
    data, generator, found = _data(), torch.Generator().manual_seed(0), []
    for _ in range(steps + 1):
        batch = _batch(data, generator)
        dist.barrier()
        began = time.perf_counter()
        job.backward(*batch)
        job.update()
        found.append(time.perf_counter() - began)
    return found[1:]


def on_link(task: dict[str, Any], device: str = "cpu") -> dict[str, Any] | None:
    """{place: {width, or "fp32": seconds of each step, of the slower rank}} of two hosts on a shaped link.

    None where this machine allows no such hosts.

    Args:
        task: rate_mbit (of each host's link, 1e6 bit/s), places, bits (a list), steps.
        device: "cpu".
    """
    if obstacle() is not None:
        return None
    found: dict[str, Any] = {}
    with Lab(2, rate_mbit=task["rate_mbit"]) as lab, Crew(lab) as ranks:
        for place in task["places"]:
            found[place] = {}
            for bits in (None, *task["bits"]):
                each = ranks.call(step_seconds, place=place, bits=bits, steps=task["steps"])
                slower = [float(max(pair)) for pair in zip(*each, strict=True)]
                found[place]["fp32" if bits is None else str(bits)] = slower
    return found

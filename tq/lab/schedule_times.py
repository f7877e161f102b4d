"""Steps of pipeline schedules on real ranks, timed, beside the simulator: stages whose passes are waits.

Ranks are processes that exchange activations and gradients on PyTorch's pipelining runtime. What a stage would compute
is a sleep of fixed length: F in the forward pass, I where the gradient of its input passes, W where that of its weight
does. So many ranks overlap on few cores. Python, autograd and messages are real; kernels, and links that are busy, are
not there.

PyTorch's first stage asks for no gradient of its input: where a schedule splits the backward pass, its I does nothing
and its W is the whole pass. The simulator is given the same.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tq.systems.schedule_search import search
from tq.systems.schedules import Action, Cost, Order, gpipe, one_f_one_b, simulate, zb_h2
from tq.train import pipeline
from tq.train.crew import crew

FITTED = "1f1b"  # the schedule that the cost of an action comes from
#: Name to (PyTorch's schedule, or "own", and the stages of a rank).
KINDS: dict[str, tuple[str, int]] = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved": ("interleaved", 2),
    "looped-bfs": ("looped-bfs", 2),
    "zb1p": ("zb1p", 2),
    "zbv": ("zbv", 2),
    "dualpipev": ("dualpipev", 2),
    "zb-h2": ("own", 1),
    "searched": ("own", 1),
}
WIDTH = 64  # numbers that travel for each sequence


class _Pass(torch.autograd.Function):
    """F, and I on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, input_s: float) -> Tensor:
        ctx.input_s = input_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.input_s)
        return gradients[0], None, None


class _Weight(torch.autograd.Function):
    """W: a weight whose gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_s: float) -> Tensor:
        ctx.weight_s = weight_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.weight_s)
        return gradients[0], None


class Waits(nn.Module):
    """A stage that waits: ``forward_s`` in F, ``input_s`` in I, ``weight_s`` in W.

    Args:
        first: whether it has the embedding, through which the gradient of its weights passes.
    """

    def __init__(self, forward_s: float, input_s: float, weight_s: float, *, first: bool) -> None:
        super().__init__()
        self.seconds = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Parameter(torch.zeros(WIDTH)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [sequences, WIDTH], float32, to the same."""
        forward_s, input_s, weight_s = self.seconds
        x = x if self.embed is None else x + self.embed
        passed: Tensor = _Pass.apply(x, forward_s, input_s)
        return passed + _Weight.apply(self.weight, weight_s)


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def on_rank(
    folder: Path, names: list[str], micro: int, waits: list[float], steps: int, orders: dict[str, Any]
) -> dict[str, Any]:
    """On a rank of a crew: {name: when each step began and ended on a clock that all ranks share, the order, and its
    overlapped passes}. Schedules take turns, step by step, so that what disturbs one disturbs all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {}
    ready: dict[str, Any] = {}
    x, y = torch.zeros(micro, WIDTH), torch.ones(micro, WIDTH)
    for name in names:
        kind, chunks = KINDS[name]
        held = pipeline.placement(kind, ranks, chunks)[rank]
        parts = [Waits(*[seconds / chunks for seconds in waits], first=stage == 0) for stage in held]
        stages = [
            PipelineStage(part, stage, ranks * chunks, torch.device("cpu"))
            for part, stage in zip(parts, held, strict=True)
        ]
        run = pipeline.schedule(kind, stages, micro, _loss, orders.get(name) if kind == "own" else None)
        ready[name] = run, (x,) if 0 in held else (), {"target": y} if ranks * chunks - 1 in held else {}
        found[name] = {"times": []}
    for number in range(steps + 1):
        for name, (run, given, target) in ready.items():
            dist.barrier()
            began = time.perf_counter()
            run.step(*given, **target, **({"losses": []} if target else {}))
            if number:  # the first one agrees on shapes
                found[name]["times"].append([began, time.perf_counter()])
    for name, (run, _, _) in ready.items():
        ours = name in orders
        order, late = (orders[name], []) if ours else (pipeline.order_of(run), pipeline.overlapped_of(run))
        found[name] |= {"order": order, "late": late}
    return found


def cost_of(waits: list[float], stages: int, chunks: int = 1, action: float = 0.0, message: float = 0.0) -> Cost:
    """What the simulator is told of stages that wait: the first one's I is nothing, its W the whole backward pass.

    Args:
        waits: seconds of F, I and W of a rank's whole share of the model.
        stages: of the pipeline. chunks: stages of a rank; each waits its part.
        action: seconds of dispatch per action. message: the same, of passes that receive or send.
    """
    forward, inputs, weights = (seconds / chunks for seconds in waits)
    rest = stages - 1
    own_weights = [inputs + weights, *[weights] * rest]
    return Cost(forward, [0.0, *[inputs] * rest], own_weights, action=action, message=message)


def _simulated(order: Order, waits: list[float], chunks: int, action: float) -> float:
    return simulate(order, cost_of(waits, len(order) * chunks, chunks, action)).makespan


def fitted(order: Order, waits: list[float], seconds: float) -> float:
    """Seconds of dispatch per action with which the simulated order lasts this long; 0 where it never is so short."""
    low, high = 0.0, max(seconds, sum(waits))
    if _simulated(order, waits, 1, low) >= seconds:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _simulated(order, waits, 1, middle) < seconds else (low, middle)
    return (low + high) / 2


def _orders(names: list[str], ranks: int, micro: int, waits: list[float]) -> dict[str, Order]:
    """Orders that do not come from PyTorch; those of GPipe and 1F1B it does not say."""
    found = {"1f1b": one_f_one_b(ranks, micro), "gpipe": gpipe(ranks, micro)}
    if "zb-h2" in names:
        found["zb-h2"] = zb_h2(ranks, micro)
    if "searched" in names:
        found["searched"] = search(ranks, micro, cost_of(waits, ranks), 1.5 * ranks)
    return {name: found[name] for name in names if name in found}


def times(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Steps, and what the simulator says of them: {"action": seconds of dispatch, fitted on 1F1B; "steps": {name:
    seconds of each step}; and {name: seconds} in three ways}.

    "plain" has no dispatch. "simulated" adds the fitted one to every action. "refined" adds the same number to those
    that exchange messages, F, I and B, and lets the first of two overlapped passes send after both, as PyTorch's
    runtime does. On 1F1B the two are the same. A step lasts from the first rank's start to the last rank's end.

    Args:
        task: ranks, micro (micro-batches), waits (seconds of F, I and W of a rank), steps, and names of ``KINDS``, 1F1B
            among them.
        device: "cpu".
    """
    ranks, micro, waits, names = task["ranks"], task["micro"], task["waits"], task["names"]
    if FITTED not in names:
        raise ValueError(f"names must hold {FITTED!r}, which the cost of an action is fitted on, got {names}")
    orders: dict[str, Any] = _orders(names, ranks, micro, waits)
    found = crew(
        "tq.lab.schedule_times:on_rank", ranks, 900.0, names=names, micro=micro, waits=waits, steps=task["steps"],
        orders=orders,
    )  # fmt: skip
    steps = {
        name: [
            max(each[name]["times"][k][1] for each in found) - min(each[name]["times"][k][0] for each in found)
            for k in range(task["steps"])
        ]
        for name in names
    }
    ran = {name: [[Action(*a) for a in actions] for actions in found[0][name]["order"]] for name in names}
    action = fitted(ran[FITTED], waits, statistics.median(steps[FITTED]))
    late = {name: [Action(*a) for a in found[0][name]["late"]] for name in names}
    result: dict[str, Any] = {"action": action, "steps": steps, "simulated": {}, "refined": {}, "plain": {}}
    for name in names:
        chunks = KINDS[name][1]
        result["simulated"][name] = _simulated(ran[name], waits, chunks, action)
        result["plain"][name] = _simulated(ran[name], waits, chunks, 0.0)
        cost = cost_of(waits, ranks * chunks, chunks, message=action)
        result["refined"][name] = simulate(ran[name], cost, late=late[name]).makespan
    return result

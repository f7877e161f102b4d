"""Training with a rank that is late, under four policies: on a virtual clock, and on real processes that exchange.

A centre holds the weights. Ranks take them, work, and send a gradient, or how far some local steps came; a
``Coordinator`` decides what is applied and who goes on. The weights that a result was computed from, and so the loss,
are those of the policy on either clock: on the virtual one only the waiting is missing. On real processes a rank
sleeps until the drawn time of its step is over, so it is slow without work for a core that others share.

Rates: the centre's AdamW for joined gradients; a share of it per result under bounded staleness, where a step is as
many updates as there are ranks; for local steps each rank's own AdamW, and Nesterov's outer step of DiLoCo.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tq.lab.ranks import together
from tq.lab.stopping import Stopper
from tq.systems.stragglers import POLICIES, Arrival, Coordinator, Delays, Policy, arrivals, forecast
from tq.train.model.corpus import Corpus, load
from tq.train.model.gpt import GPT, GPTConfig
from tq.train.model.loop import EVALUATION_SEED

MODEL = GPTConfig(layers=2, hidden=64, heads=2, vocab=256, seq=64)
BATCH = 4  # sequences of a rank
WARMUP = 20  # steps of linear rise; the rate is constant after them, as runs end at a loss and not at a step
OUTER = {"momentum": 0.9, "nesterov": True}  # of local steps, as in ``tq.train.diloco``
EVALUATED = 4  # batches of the held-out loss
STOP = -1.0


@dataclass(frozen=True)
class Straggling:
    """What decides a run; plain values, so that it can be a task.

    Attributes:
        policy: number of a policy in ``POLICIES``.
        ranks: that work, besides the centre.
        steps: until the run ends.
        lr: of AdamW. seed: of weights, data and delays.
        base_s, spread, slow_rank, sudden, slowdown: of ``Delays``.
        exchange_s: of ``forecast``; on the virtual clock.
        looks: evaluations of the held-out loss.
        max_bytes: of the corpus.
        outer_lr: of the outer step that joins local steps.
        stopped: a late rank of the processes is stopped by the kernel, with all its threads, and does not sleep.
    """

    policy: int = 0
    ranks: int = 4
    steps: int = 200
    lr: float = 3e-3
    seed: int = 0
    base_s: float = 0.1
    spread: float = 0.1
    slow_rank: int | None = None
    sudden: float = 0.0
    slowdown: float = 3.0
    exchange_s: float = 0.0
    looks: int = 20
    max_bytes: int = 2_000_000
    outer_lr: float = 0.7
    stopped: bool = False

    @property
    def chosen(self) -> Policy:
        """The policy itself."""
        return POLICIES[self.policy]

    @property
    def times(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[units, ranks] seconds of steps; more than any rank takes."""
        delays = Delays(self.base_s, self.spread, self.slow_rank, self.sudden, self.slowdown)
        return delays.draw(4 * self.steps + 64, self.ranks, self.seed)

    @property
    def updates(self) -> int:
        """Of the centre, in so many steps."""
        return max(1, round(self.steps / self.chosen.steps_of_update(self.ranks)))


def _rate(run: Straggling, steps: float) -> float:
    return run.lr * min(1.0, (steps + 1) / WARMUP)


class Rank:
    """One that works: it turns weights into a result."""

    def __init__(self, run: Straggling, number: int, corpus: Corpus) -> None:
        self.run, self.number, self.corpus, self.steps_done = run, number, corpus, 0
        self.model = GPT(MODEL, run.seed)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=run.lr, betas=(0.9, 0.95), fused=True)

    def backward(self) -> None:
        """The gradient of the next batch of this rank."""
        seed = self.run.seed * 1000 + self.number
        ids, targets = self.corpus.batch(self.steps_done, BATCH, MODEL.seq, seed)
        self.steps_done += 1
        self.model.zero_grad()
        self.model(ids, targets)[1].backward()

    @torch.no_grad()
    def take(self, weights: Tensor) -> None:
        """Go on from these weights."""
        vector_to_parameters(weights, self.model.parameters())

    def gradient(self) -> Tensor:
        """Flat, of the last batch."""
        return torch.cat([p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None])

    def step(self) -> None:
        """One local step."""
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner.param_groups[0]["lr"] = _rate(self.run, self.steps_done)
        self.inner.step()

    def result(self, weights: Tensor) -> Tensor:
        """What a unit of work sends: a gradient, or how far local steps went from the weights, with reversed sign."""
        self.take(weights.clone())
        if self.run.chosen.local_steps == 1:
            self.backward()
            return self.gradient()
        for _ in range(self.run.chosen.local_steps):
            self.step()
        return weights - parameters_to_vector(self.model.parameters()).detach()


class Centre:
    """Holds the weights, applies results as the coordinator says, and looks at the held-out loss on the way."""

    def __init__(self, run: Straggling, corpus: Corpus) -> None:
        self.run, self.corpus = run, corpus
        self.coordinator = Coordinator(run.chosen, run.ranks)
        self.model = GPT(MODEL, run.seed)
        self.weights = torch.nn.Parameter(parameters_to_vector(self.model.parameters()).detach().clone())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW([self.weights], lr=run.lr, betas=(0.9, 0.95), fused=True)
            if run.chosen.local_steps == 1 else torch.optim.SGD([self.weights], run.outer_lr, **OUTER)  # type: ignore[arg-type]
        )  # fmt: skip
        self.received: dict[int, Tensor] = {}
        self.updates_s, self.kept = list[float](), [(0.0, self.weights.detach().clone())]

    def apply(self, ranks: tuple[int, ...], now: float) -> None:
        """The mean of what these ranks sent moves the weights."""
        run, per_update = self.run, self.run.chosen.steps_of_update(self.run.ranks)
        mean = torch.stack([self.received.pop(rank) for rank in ranks]).mean(0)
        self.weights.grad = mean
        if run.chosen.local_steps == 1:
            torch.nn.utils.clip_grad_norm_([self.weights], 1.0)
            self.optimizer.param_groups[0]["lr"] = per_update * _rate(run, len(self.updates_s) * per_update)
        self.optimizer.step()
        self.updates_s.append(now)
        if len(self.updates_s) * run.looks // run.updates > (len(self.updates_s) - 1) * run.looks // run.updates:
            self.kept.append((now, self.weights.detach().clone()))

    @property
    def ended(self) -> bool:
        """Whether all updates are done."""
        return len(self.updates_s) >= self.run.updates

    @torch.no_grad()
    def losses(self) -> list[list[float]]:
        """[seconds, held-out loss in nats per token] of the weights that were kept."""
        found = []
        for now, weights in self.kept:
            vector_to_parameters(weights, self.model.parameters())
            total = 0.0
            for number in range(EVALUATED):
                ids, targets = self.corpus.batch(number, 16, MODEL.seq, EVALUATION_SEED, "valid")
                total += self.model(ids, targets)[1].item()
            found.append([now, total / EVALUATED])
        return found

    def found(self) -> dict[str, Any]:
        """What a run gives: step_s, losses (see there), and unused: results that came too late."""
        steps = len(self.updates_s) * self.run.chosen.steps_of_update(self.run.ranks)
        return {
            "step_s": self.updates_s[-1] / steps, "losses": self.losses(), "unused": self.coordinator.unused,
        }  # fmt: skip


def virtual(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A run on the virtual clock, by the fields of ``Straggling`` that are not the default; see ``Centre.found``."""
    run = Straggling(**task)
    corpus = load("stdlib", max_bytes=run.max_bytes)
    centre, workers = Centre(run, corpus), [Rank(run, number, corpus) for number in range(run.ranks)]
    held = [centre.weights.detach().clone() for _ in workers]  # the weights that each was released with

    def receive(each: Arrival) -> None:
        rank = each.rank
        if each.decision.releases and rank not in each.decision.applies:  # too late: nobody needs it
            workers[rank].steps_done += run.chosen.local_steps
        else:
            centre.received[rank] = workers[rank].result(held[rank])
        if each.decision.applies:
            centre.apply(each.decision.applies, each.now)
        for released in each.decision.releases:
            held[released] = centre.weights.detach().clone()

    for each in arrivals(centre.coordinator, run.times, run.exchange_s):
        receive(each)
        if centre.ended:
            return centre.found()
    raise AssertionError("arrivals do not end")


def _work(run: Straggling, corpus: Corpus, pause: Callable[[float], None]) -> dict[str, Any]:
    """A rank that works: weights come, a result goes, after the time that its steps were given."""
    number, centre = dist.get_rank(), run.ranks
    me, times, late = Rank(run, number, corpus), run.times[:, number], 0
    me.backward()  # the first is slower than others
    me.steps_done = 0
    message = torch.empty(parameters_to_vector(me.model.parameters()).numel() + 1)
    dist.barrier()
    while True:
        dist.recv(message, centre)
        began, version = time.perf_counter(), message[0].clone()
        if version == STOP:
            return {"late": late}
        first = me.steps_done
        result = me.result(message[1:])
        left = began + float(times[first : me.steps_done].sum()) - time.perf_counter()
        late += left < 0
        pause(max(0.0, left))
        message[0], message[1:] = version, result
        dist.send(message, centre)


def _lead(run: Straggling, corpus: Corpus) -> dict[str, Any]:
    """The centre: results come in any order. At the end those that still work are heard, and all are sent home."""
    centre = Centre(run, corpus)
    message = torch.empty(centre.weights.numel() + 1)
    working = set(range(run.ranks))

    def release(rank: int, version: float) -> None:
        dist.send(torch.cat([torch.tensor([version]), centre.weights.detach()]), rank)

    dist.barrier()
    began = time.perf_counter()
    for rank in working:
        release(rank, 0.0)
    while not centre.ended:
        rank = dist.recv(message)
        working.discard(rank)
        centre.received[rank] = message[1:].clone()
        decision = centre.coordinator.arrived(rank, int(message[0]))
        if decision.applies:
            centre.apply(decision.applies, time.perf_counter() - began)
        for each in decision.releases if not centre.ended else ():
            working.add(each)
            release(each, float(centre.coordinator.version))
    for rank in range(run.ranks):
        if rank in working:
            dist.recv(message, rank)
        release(rank, STOP)
    return centre.found()


def _real(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    run = Straggling(**task)
    corpus = load("stdlib", max_bytes=run.max_bytes)
    if dist.get_rank() == run.ranks:
        return _lead(run, corpus)
    if not run.stopped:
        return _work(run, corpus, time.sleep)
    with Stopper(run.base_s * run.chosen.local_steps) as stopper:  # a rank that is not late is not stopped
        return _work(run, corpus, stopper.pause)


def real(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """The same on processes, a gloo rank each and one for the centre; with late: units of work that took longer than
    they were given, of all ranks."""
    run = Straggling(**task)
    load("stdlib", max_bytes=run.max_bytes)  # is cached for the ranks
    found = together(_real, run.ranks + 1, task=asdict(run))
    return found[-1] | {"late": sum(each["late"] for each in found[:-1])}


def predicted(run: Straggling) -> dict[str, float]:
    """The forecast of such a run: step_s, and the shares busy and unused."""
    found = forecast(run.chosen, run.times, run.steps, run.exchange_s)
    return {"step_s": found.step_s, "busy": found.busy, "unused": found.unused}


def seconds_to(loss: float, losses: list[list[float]]) -> float | None:
    """When a run first had this held-out loss, linear between two looks; None where it never had.

    Example:
        >>> seconds_to(3.0, [[0.0, 5.0], [10.0, 4.0], [20.0, 2.0]]), seconds_to(1.0, [[0.0, 5.0]])
        (15.0, None)
    """
    for (before, high), (after, low) in zip(losses, losses[1:], strict=False):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None

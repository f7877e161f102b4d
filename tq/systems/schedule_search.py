"""A search for pipeline schedules with few bubbles under a limit of memory.

Ranks act in the order of time. A free rank prefers an input pass (I) that has arrived, then a forward pass (F) that
fits under its limit of micro-batches in flight, and fills what would be idle with weight passes (W). The search tries
profiles of those limits over the ranks, and how long a rank rather idles than begins a W before an I that is on its way
(patience), or an F before its very first I (haste). It keeps the order of the shortest span,
among them ZB-H1 and ZB-H2 where they fit.

The idea of splitting B is of Qi et al. 2023 (arXiv:2401.10241), whose heuristic has other rules.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from tq.systems.arguments import positive, positive_int
from tq.systems.schedules import Action, Cost, Order, simulate, zb_h1, zb_h2

PLACEMENTS = ("line", "v")


def placement(stages: int, kind: str) -> list[list[int]]:
    """Stages of each of p ranks: "line" gives rank r stage r, "v" stages r and 2 p - 1 - r."""
    if kind not in PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {kind!r}")
    return [[r] if kind == "line" else [r, 2 * stages - 1 - r] for r in range(stages)]


@dataclass
class _Rank:
    stages: list[int]
    limit: float
    free: float = 0.0
    held: float = 0.0
    pending: list[Action] = field(default_factory=list)  # W that may be done
    actions: list[Action] = field(default_factory=list)
    blocked: bool = False
    begun: bool = False  # its backward passes


class _Greedy:
    """One run of the rules: who does what, in the order of time."""

    def __init__(
        self, held_by: Sequence[Sequence[int]], micro_batches: int, cost: Cost, limits: Sequence[float],
        *, patience: float, haste: float, kept: float,
    ) -> None:
        self.ranks = [_Rank(list(s), limit) for s, limit in zip(held_by, limits, strict=True)]
        self.rank_of = {stage: rank for rank, stages in enumerate(held_by) for stage in stages}
        self.last, self.micro_batches, self.cost, self.patience = max(self.rank_of), micro_batches, cost, patience
        self.kept, self.haste = kept, haste
        self.arrived: dict[Action, float] = {Action("F", 0, m): 0.0 for m in range(micro_batches)}
        self.next = {(kind, stage): 0 for kind in "FI" for stage in self.rank_of}
        self.queue: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(self.ranks))]

    def run(self) -> Order | None:
        heapq.heapify(self.queue)
        while self.queue:
            now, number = heapq.heappop(self.queue)
            rank = self.ranks[number]
            if now < rank.free:
                continue
            chosen, wake = self._choose(rank, now)
            if chosen is not None:
                self._do(rank, number, chosen, now)
            elif wake is not None:
                heapq.heappush(self.queue, (wake, number))
            else:
                rank.blocked = True
        wanted = 3 * self.micro_batches * (self.last + 1)
        return [r.actions for r in self.ranks] if sum(len(r.actions) for r in self.ranks) == wanted else None

    def _choose(self, rank: _Rank, now: float) -> tuple[Action | None, float | None]:
        """What to do now, or when to look again; (None, None): when something arrives."""
        each, soon, urgent = 1 / len(rank.stages), None, None
        ready: list[tuple[int, int, Action]] = []
        for kind in ("I", "F"):
            for stage in rank.stages:
                micro = self.next[kind, stage]
                if micro == self.micro_batches:
                    continue
                # a chunk past the first gets a place kept free for it, or all places go to micro-batches that wait
                room = rank.limit - each * (len(rank.stages) - 1 - rank.stages.index(stage))
                if kind == "F" and rank.held + each > room + 1e-9:
                    continue
                arrives = self.arrived.get(Action(kind, stage, micro))
                if arrives is None:
                    continue
                if arrives <= now + 1e-12:
                    ready.append((0 if kind == "I" else 1, -stage, Action(kind, stage, micro)))
                else:
                    urgent = arrives if kind == "I" and urgent is None else urgent
                    soon = arrives if soon is None else min(soon, arrives)
        if ready:
            chosen = min(ready)[2]
            # an F begun just before the first I arrives would hold up the first backward pass of all earlier stages
            first = not rank.begun and chosen.kind == "F"
            if first and urgent is not None and urgent - now <= self.haste * self.cost.of(chosen):
                return None, urgent
            return chosen, None
        if rank.pending:
            weight = self.cost.of(rank.pending[0])
            if urgent is None or urgent - now >= self.patience * weight:
                return rank.pending[0], None
        return None, soon

    def _do(self, rank: _Rank, number: int, action: Action, now: float) -> None:
        kind, stage, micro = action
        each, end = 1 / len(rank.stages), now + self.cost.of(action)
        rank.actions.append(action)
        rank.free = end
        if kind == "F":
            rank.held += each
            self.next["F", stage] += 1
            self._post(Action("I" if stage == self.last else "F", min(stage + 1, self.last), micro), end, number)
        elif kind == "I":
            self.next["I", stage] += 1
            rank.held -= (1 - self.kept) * each
            rank.begun = True
            rank.pending.append(Action("W", stage, micro))
            if stage:
                self._post(Action("I", stage - 1, micro), end, number)
        else:
            rank.held -= self.kept * each
            rank.pending.remove(action)
        heapq.heappush(self.queue, (end, number))

    def _post(self, action: Action, end: float, sender: int) -> None:
        to = self.rank_of[action.stage]
        arrives = end + (self.cost.transfer if to != sender else 0.0)
        self.arrived[action] = arrives
        if self.ranks[to].blocked:
            self.ranks[to].blocked = False
            heapq.heappush(self.queue, (max(end if to == sender else arrives, self.ranks[to].free), to))


def _profiles(stages: int, limit: float, chunks: int) -> Iterator[list[float]]:
    """Limits of micro-batches in flight, rank by rank: flat, and falling to fewer on the later ranks."""
    least = 1.0 if chunks == 1 else 1.0 + 1 / chunks
    for last in sorted({limit, float(stages), least}, reverse=True):
        if least <= last <= limit:
            steps = max(1, stages - 1)
            yield [limit + (last - limit) * rank / steps for rank in range(stages)]


PATIENCES = (0.0, 0.5, 1.0)
ENOUGH = 3e-3  # an idle share at which the search stops
HASTES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def search(
    stages: int, micro_batches: int, cost: Cost, limit: float, *, kind: str = "line", kept: float = 1.0,
    patiences: Sequence[float] = PATIENCES,
) -> Order:  # fmt: skip
    """The order of the shortest span that the rules find; it holds at most ``limit`` micro-batches in flight.

    Args:
        stages: p, the ranks of the pipeline.
        micro_batches: m.
        cost: seconds of a pass; where "v" places two stages on a rank, of one of the 2 p.
        limit: micro-batches in flight on every rank; at least 1 (1.5 for "v").
        kind: "line" (default) or "v", as in ``placement``.
        kept: share of a micro-batch's activations that is held from I to W; all by default.

    Raises:
        ValueError: if the limit is too small for any order.
    """
    positive_int("stages", stages)
    positive_int("micro_batches", micro_batches)
    positive("limit", limit)
    held_by = placement(stages, kind)
    best: tuple[float, float, Order] | None = None
    for known in (zb_h1, zb_h2) if kind == "line" else ():
        timing = simulate(known(stages, micro_batches), cost, kept)
        if max(timing.in_flight) <= limit + 1e-9 and (best is None or timing.span < best[0]):
            best = (timing.span, timing.makespan, known(stages, micro_batches))
    for limits in _profiles(stages, limit, len(held_by[0])):
        for patience, haste in product(PATIENCES, HASTES):
            order = _Greedy(held_by, micro_batches, cost, limits, patience=patience, haste=haste, kept=kept).run()
            if order is None:
                continue
            timing = simulate(order, cost, kept)
            if timing.bubble < ENOUGH and max(timing.in_flight) <= limit + 1e-9:
                return order
            if max(timing.in_flight) <= limit + 1e-9 and (best is None or (timing.span, timing.makespan) < best[:2]):
                best = (timing.span, timing.makespan, order)
    if best is None:
        raise ValueError(f"no order holds at most {limit:g} micro-batches in flight on every rank")
    return best[2]

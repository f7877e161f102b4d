"""Pipeline schedules: the order of every rank's passes, and a simulator that says what an order costs.

An order lists for every rank what it does, one action after the other: F (forward pass of a micro-batch through a
stage), B (its whole backward pass), I and W (the two halves of B: gradients of the stage's input, gradients of its
weights). A pass starts as soon as its rank is free and its input has arrived, and nothing starts it earlier.

    cost = Cost(forward=1.0, input=1.0, weight=1.0, transfer=0.1)
    simulate(one_f_one_b(8, 24), cost).bubble
    simulate(search(8, 24, cost, limit=16), cost).bubble

Stages number from 0; a rank may hold several of them. Not modelled: links that two transfers share, passes that slow
each other down, time that differs from micro-batch to micro-batch.

Sources: Huang et al. 2019 (arXiv:1811.06965), GPipe; Narayanan et al. 2021 (arXiv:2104.04473), 1F1B and interleaving;
Lamy-Poirier 2023 (arXiv:2211.05953), looped breadth-first; Qi et al. 2023 (arXiv:2401.10241), the split backward pass,
ZB-H1 and ZB-H2, and the cost of a schedule as the longest span of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tq.systems.arguments import positive, positive_int

KINDS = ("F", "I", "W", "B")


class Action(NamedTuple):
    """One pass: a kind of ``KINDS``, the stage and the micro-batch that it is of."""

    kind: str
    stage: int
    micro: int


Order = list[list[Action]]


@dataclass(frozen=True)
class Cost:
    """Seconds of the passes of one micro-batch through a stage; any other unit of time will do.

    Attributes:
        forward: of F; a number for all stages, or one a stage.
        input: of I, the backward pass as far as the gradients of the stage's input.
        weight: of W, the gradients of the weights; B takes ``input + weight``.
        transfer: from the end of a pass until its result can be used on another rank; 0 by default.
        action: of starting any pass (dispatch); 0 by default.
        message: of starting a pass that receives or sends (F, I, B), beside ``action``; 0 by default.

    Raises:
        ValueError: if one of them is negative or not finite.
    """

    forward: float | Sequence[float]
    input: float | Sequence[float]
    weight: float | Sequence[float]
    transfer: float = 0.0
    action: float = 0.0
    message: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight"):
            value = getattr(self, name)
            for one in value if isinstance(value, Sequence) else (value,):
                positive(name, one, zero=True)
        positive("transfer", self.transfer, zero=True)
        positive("action", self.action, zero=True)
        positive("message", self.message, zero=True)

    def of(self, action: Action) -> float:
        """Seconds of a pass, its dispatch included."""
        names = {"F": ("forward",), "I": ("input",), "W": ("weight",), "B": ("input", "weight")}[action.kind]
        values = [getattr(self, name) for name in names]
        start = self.action + (0.0 if action.kind == "W" else self.message)
        return start + sum(v[action.stage] if isinstance(v, Sequence) else v for v in values)


@dataclass(frozen=True)
class Timing:
    """When an order's passes run.

    Attributes:
        starts, ends: seconds, rank by rank, in the order of the actions.
        work: seconds that each rank is busy.
        in_flight: most micro-batches, rank by rank, whose activations it holds at once; a stage of v counts 1 / v.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    work: list[float]
    in_flight: list[float]

    @property
    def span(self) -> float:
        """Longest time from a rank's first pass to its last: a step's cost where nothing joins the ranks at its end."""
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def makespan(self) -> float:
        """From the first pass of any rank to the last of any: a step's cost where all ranks wait for each other."""
        return max(ends[-1] for ends in self.ends) - min(starts[0] for starts in self.starts)

    @property
    def bubble(self) -> float:
        """Idle share of the span: what the zero-bubble paper prints."""
        return 1 - max(self.work) / self.span

    @property
    def bubble_of_makespan(self) -> float:
        """Idle share of the makespan."""
        return 1 - max(self.work) / self.makespan


def ranks_of(order: Order) -> dict[int, int]:
    """{stage: the rank that holds it}; ValueError if two ranks do."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(order):
        for action in actions:
            if found.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} must be on one rank, is on {found[action.stage]} and {rank}")
    return found


def check(order: Order, micro_batches: int) -> None:
    """ValueError unless every stage does F and a whole backward pass of every micro-batch once, W after its I."""
    stages = ranks_of(order)
    if sorted(stages) != list(range(len(stages))):
        raise ValueError(f"stages must be numbered 0, 1, ..., got {sorted(stages)}")
    done = [action for actions in order for action in actions]
    if len(set(done)) != len(done):
        raise ValueError("an order must not hold a pass twice")
    wanted = 0
    kinds = {action: place for actions in order for place, action in enumerate(actions)}
    for stage in stages:
        for micro in range(micro_batches):
            places = {kind: kinds.get(Action(kind, stage, micro)) for kind in KINDS}
            forward, whole, first, second = places["F"], places["B"], places["I"], places["W"]
            split = first is not None and second is not None and whole is None and first < second
            joined = whole is not None and first is None and second is None
            if forward is None or not (split or joined):
                raise ValueError(f"stage {stage} must do F and either B or I and W of micro-batch {micro}")
            wanted += 3 if split else 2
    if len(done) != wanted:
        raise ValueError("an order must not hold passes of other micro-batches")


def simulate(order: Order, cost: Cost, kept: float = 1.0, *, late: Sequence[Action] = ()) -> Timing:
    """When every pass runs if each rank does its list in order.

    Args:
        order: rank by rank, what it does.
        cost: seconds of the passes.
        kept: share of a micro-batch's activations that is held from I to W; all by default.
        late: passes whose result leaves the rank only when the next pass of its list is over.

    Raises:
        ValueError: if the order can not be run: ranks wait for each other for ever.
    """
    positive("kept", kept, zero=True, most=1.0)
    rank_of = ranks_of(order)
    last = max(rank_of)
    ended: dict[Action, float] = {}
    held_back = set(late)
    starts: list[list[float]] = [[] for _ in order]
    ends: list[list[float]] = [[] for _ in order]
    left, moved = sum(map(len, order)), True

    def arrives(needs: Action, rank: int) -> float | None:
        end = ended.get(needs)
        if end is None and needs.kind == "I":
            end = ended.get(Action("B", needs.stage, needs.micro))
        return None if end is None else end + (cost.transfer if rank_of[needs.stage] != rank else 0.0)

    while left and moved:
        moved = False
        for rank, actions in enumerate(order):
            while len(ends[rank]) < len(actions):
                action = actions[len(ends[rank])]
                times = [arrives(needs, rank) for needs in _needs(action, last)]
                if any(time is None for time in times):
                    break
                start = max([ends[rank][-1] if ends[rank] else 0.0, *[time for time in times if time is not None]])
                starts[rank].append(start)
                before = actions[len(ends[rank]) - 1] if ends[rank] else None
                ends[rank].append(start + cost.of(action))
                for done in (before, action):
                    if done is not None and (done in held_back) == (done is before):
                        ended[done] = ends[rank][-1]
                left, moved = left - 1, True
    if left:
        waiting = next(a[len(e)] for a, e in zip(order, ends, strict=True) if len(e) < len(a))
        raise ValueError(f"the order can not be run: {waiting} waits for a pass that never comes")
    work = [sum(cost.of(action) for action in actions) for actions in order]
    return Timing(starts, ends, work, [_most_held(actions, kept) for actions in order])


def _needs(action: Action, last: int) -> list[Action]:
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro)]
    own = [Action("F", stage, micro)]
    return own if stage == last else [*own, Action("I", stage + 1, micro)]


def _most_held(actions: Sequence[Action], kept: float) -> float:
    each = 1 / len({action.stage for action in actions})
    change = {"F": 1.0, "I": kept - 1.0, "W": -kept, "B": -1.0}
    held = most = 0.0
    for action in actions:
        held += change[action.kind] * each
        most = max(most, held)
    return round(most, 9)


def gpipe(stages: int, micro_batches: int) -> Order:
    """All forward passes, then all backward passes: as many micro-batches in flight as there are."""
    positive_int("stages", stages)
    positive_int("micro_batches", micro_batches)
    micros = range(micro_batches)
    return [[Action("F", s, m) for m in micros] + [Action("B", s, m) for m in micros] for s in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> Order:
    """1F1B: stage s of p starts with p - s forward passes and then alternates; at most p micro-batches in flight."""
    positive_int("stages", stages)
    positive_int("micro_batches", micro_batches)
    return [_alternating(s, micro_batches, stages - s, None) for s in range(stages)]


def zb_h1(stages: int, micro_batches: int) -> Order:
    """ZB-H1: 1F1B whose stage s puts off s weight passes; as many micro-batches in flight as 1F1B."""
    positive_int("stages", stages)
    positive_int("micro_batches", micro_batches)
    return [_alternating(s, micro_batches, stages - s, s) for s in range(stages)]


def zb_h2(stages: int, micro_batches: int) -> Order:
    """ZB-H2: 2 (p - s) - 1 forward passes at the start, 2 s weight passes put off; 2 p - 1 micro-batches in flight."""
    positive_int("stages", stages)
    positive_int("micro_batches", micro_batches)
    return [_alternating(s, micro_batches, 2 * (stages - s) - 1, 2 * s) for s in range(stages)]


def _alternating(stage: int, micro_batches: int, warm_up: int, delay: int | None) -> list[Action]:
    """Forward passes, then one backward and one forward pass in turn; W so many I late, or None for whole B."""
    forward = min(warm_up, micro_batches)
    actions = [Action("F", stage, m) for m in range(forward)]
    for micro in range(micro_batches):
        actions.append(Action("B" if delay is None else "I", stage, micro))
        if delay is not None and micro >= delay:
            actions.append(Action("W", stage, micro - delay))
        if forward < micro_batches:
            actions.append(Action("F", stage, forward))
            forward += 1
    if delay is not None:
        actions += [Action("W", stage, m) for m in range(max(0, micro_batches - delay), micro_batches)]
    return actions


def interleaved(stages: int, micro_batches: int, chunks: int) -> Order:
    """Interleaved 1F1B (Megatron-LM): rank r of p holds stages r, r + p, ...; micro-batches in multiples of p.

    Args:
        stages: p, the ranks. micro_batches: m. chunks: v, stages per rank.

    Raises:
        ValueError: if p does not divide m.
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        positive_int(name, value)
    if micro_batches % stages:
        raise ValueError(f"micro_batches must be a multiple of stages={stages}, got {micro_batches}")
    total = micro_batches * chunks

    def action(kind: str, rank: int, turn: int) -> Action:
        group, inside = divmod(turn, stages * chunks)
        chunk, micro = divmod(inside, stages)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Action(kind, rank + chunk * stages, group * stages + micro)

    order = []
    for rank in range(stages):
        warm_up = min(total, (stages - rank - 1) * 2 + (chunks - 1) * stages) if chunks > 1 else stages - rank - 1
        warm_up = min(total, warm_up)
        actions = [action("F", rank, turn) for turn in range(warm_up)]
        for turn in range(total - warm_up):
            actions += [action("F", rank, warm_up + turn), action("B", rank, turn)]
        actions += [action("B", rank, turn) for turn in range(total - warm_up, total)]
        order.append(actions)
    return order


def looped_bfs(stages: int, micro_batches: int, chunks: int) -> Order:
    """Looped breadth-first: every chunk of a rank does all micro-batches before the next chunk begins."""
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        positive_int(name, value)
    micros = range(micro_batches)
    return [
        [Action("F", r + c * stages, m) for c in range(chunks) for m in micros]
        + [Action("B", r + c * stages, m) for c in reversed(range(chunks)) for m in reversed(micros)]
        for r in range(stages)
    ]

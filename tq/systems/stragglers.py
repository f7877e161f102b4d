"""Ranks that are late, and four ways to live with them: who waits for whom, decided here for real and virtual clocks.

Ranks send their results to a coordinator. *Synchronous*: it waits for all. *Backup ranks*: it goes on without the k
slowest of each step, whose late results it drops. *Bounded staleness*: it applies every result at once, and a rank may
be at most s steps ahead of the slowest. *Local steps*: ranks take H steps alone before they meet. The same
``Coordinator`` serves processes that train (``tq.lab.straggler_runs``) and the forecast of their times.

Sources: Chen et al. 2016 (Revisiting Distributed Synchronous SGD); Ho et al. 2013 (Stale Synchronous Parallel);
Stich 2019 (Local SGD).

Shapes: u units of work of r ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import positive, positive_int


@dataclass(frozen=True)
class Policy:
    """Who waits for whom.

    Attributes:
        name: for people.
        dropped: k, ranks of each step that nobody waits for.
        staleness: s, steps that a rank may be ahead of the slowest; None: results are joined step by step.
        local_steps: H, steps of a rank between two results.

    Raises:
        ValueError: for numbers below their least, or ``dropped`` together with ``staleness``.
    """

    name: str
    dropped: int = 0
    staleness: int | None = None
    local_steps: int = 1

    def __post_init__(self) -> None:
        positive_int("dropped", self.dropped, 0)
        positive_int("local_steps", self.local_steps)
        if self.staleness is not None:
            positive_int("staleness", self.staleness, 0)
            if self.dropped:
                raise ValueError("dropped and staleness exclude each other: a stale result is applied, not dropped")

    def steps_of_update(self, ranks: int) -> float:
        """Steps that an update stands for: H, or a rank's share of one where each result is an update."""
        return self.local_steps / (ranks if self.staleness is not None else 1)


POLICIES = (
    Policy("synchronous"), Policy("one backup rank", dropped=1), Policy("staleness 4", staleness=4),
    Policy("8 local steps", local_steps=8), Policy("32 local steps", local_steps=32),
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What the coordinator does when a result arrives: the ranks whose results it ``applies`` now, as one mean, and
    those that it ``releases`` to their next unit of work."""

    applies: tuple[int, ...]
    releases: tuple[int, ...]


class Coordinator:
    """Decides, for each result in the order of arrival, what is applied and who goes on.

    Args:
        policy: who waits for whom.
        ranks: that send results; more than ``policy.dropped``.

    Attributes:
        version: updates applied so far.
        unused: results that came too late and were dropped.

    Example:
        >>> coordinator = Coordinator(Policy("one backup rank", dropped=1), 3)
        >>> coordinator.arrived(0, 0), coordinator.arrived(2, 0)
        (Decision(applies=(), releases=()), Decision(applies=(0, 2), releases=(0, 2)))
        >>> coordinator.arrived(1, 0)  # too late: dropped, and sent on at once
        Decision(applies=(), releases=(1,))
    """

    def __init__(self, policy: Policy, ranks: int) -> None:
        positive_int("ranks", ranks)
        if policy.dropped >= ranks:
            raise ValueError(f"dropped must be less than ranks={ranks}, got {policy.dropped}")
        self.policy, self.ranks = policy, ranks
        self.version = self.unused = 0
        self.gathered: list[int] = []
        self.clocks, self.waiting = [0] * ranks, set[int]()

    def arrived(self, rank: int, version: int) -> Decision:
        """A result of ``rank`` that was computed from the weights of ``version``.

        Raises:
            ValueError: for a rank that is none or has sent its result already, or a version of the future.
        """
        if not 0 <= rank < self.ranks or not 0 <= version <= self.version:
            raise ValueError(f"rank {rank} of {self.ranks} cannot have a result of version {version} of {self.version}")
        if rank in self.gathered or rank in self.waiting:
            raise ValueError(f"rank {rank} waits, it cannot send")
        if self.policy.staleness is not None:
            return self._apply_at_once(rank, self.policy.staleness)
        if version < self.version:
            self.unused += 1
            return Decision((), (rank,))
        self.gathered.append(rank)
        if len(self.gathered) < self.ranks - self.policy.dropped:
            return Decision((), ())
        together, self.gathered = tuple(self.gathered), []
        self.version += 1
        return Decision(together, together)

    def _apply_at_once(self, rank: int, staleness: int) -> Decision:
        self.version += 1
        self.clocks[rank] += 1
        self.waiting.add(rank)
        slowest = min(self.clocks)
        free = tuple(sorted(r for r in self.waiting if self.clocks[r] - slowest <= staleness))
        self.waiting -= set(free)
        return Decision((rank,), free)


@dataclass(frozen=True)
class Forecast:
    """Times of a run on a virtual clock.

    Attributes:
        updates_s: [updates] when each was applied.
        step_s: seconds per step in the mean.
        busy: share of the time that the mean rank works.
        unused: share of the results that were dropped.
    """

    updates_s: NDArray[np.float64]
    step_s: float
    busy: float
    unused: float


@dataclass(frozen=True)
class Arrival:
    """A result that arrives ``now``, ``took_s`` after its rank was released, and what the coordinator does with it."""

    now: float
    rank: int
    took_s: float
    decision: Decision


def arrivals(coordinator: Coordinator, work_s: NDArray[np.float64], exchange_s: float = 0.0) -> Iterator[Arrival]:
    """All results in the order of a virtual clock, without end; arguments as of ``forecast``."""
    work = np.asarray(work_s, dtype=np.float64)
    if work.ndim != 2 or not work.size or not (np.isfinite(work) & (work >= 0)).all():
        raise ValueError(f"work_s must be [units, ranks] of finite seconds, 0 or more, got shape {work.shape}")
    positive("exchange_s", exchange_s, zero=True, finite=True)
    alone, done = coordinator.policy.local_steps, [0] * coordinator.ranks
    under_way: list[tuple[float, int, int, float]] = []  # time, rank, version, seconds of work in it

    def start(rank: int, now: float) -> None:
        took = float(work[np.arange(done[rank], done[rank] + alone) % len(work), rank].sum())
        done[rank] += alone
        heappush(under_way, (now + took + exchange_s, rank, coordinator.version, took))

    for rank in range(coordinator.ranks):
        start(rank, 0.0)
    while True:
        now, rank, version, took = heappop(under_way)
        decision = coordinator.arrived(rank, version)
        for each in decision.releases:
            start(each, now)
        yield Arrival(now, rank, took, decision)


def forecast(policy: Policy, work_s: NDArray[np.float64], steps: int, exchange_s: float = 0.0) -> Forecast:
    """When the updates of a run come, if every rank's steps take the given times.

    Args:
        policy: who waits for whom.
        work_s: [u, r] seconds of every step of every rank, taken again from the start when they are used up.
        steps: of the run, of which an update stands for ``policy.steps_of_update``.
        exchange_s: that a result and the new weights take in sum.

    Example:
        >>> times = np.array([[1.0, 1.0, 3.0]])
        >>> [round(forecast(p, times, 96).step_s, 2) for p in POLICIES]
        [3.0, 1.0, 2.92, 3.0, 3.0]

    Bounded staleness buys the run s steps in all against a rank that is slow for good, and no speed.
    """
    positive_int("steps", steps)
    ranks = np.shape(work_s)[-1]
    coordinator, updates, busy, results = Coordinator(policy, ranks), list[float](), 0.0, 0
    wanted = max(1, round(steps / policy.steps_of_update(ranks)))
    for each in arrivals(coordinator, work_s, exchange_s):
        busy, results = busy + each.took_s, results + 1
        updates += [each.now] if each.decision.applies else []
        if len(updates) == wanted:
            break
    times = np.array(updates)
    step_s = float(times[-1]) / (wanted * policy.steps_of_update(ranks))
    share = busy / (ranks * float(times[-1])) if times[-1] else 1.0
    return Forecast(times, step_s, min(share, 1.0), coordinator.unused / results)


@dataclass(frozen=True)
class Delays:
    """How long steps take: normal around a base, at least half of it; some of them are slow.

    Attributes:
        base_s: seconds of a step in the mean, where nobody is slow.
        spread: standard deviation over ``base_s``.
        slow_rank: the one that is slow in every step, or None.
        sudden: share of the steps of any rank that are slow, at random.
        slowdown: how many times as long a slow step takes, at least 1.
    """

    base_s: float
    spread: float = 0.1
    slow_rank: int | None = None
    sudden: float = 0.0
    slowdown: float = 3.0

    def __post_init__(self) -> None:
        positive("base_s", self.base_s, finite=True)
        positive("spread", self.spread, zero=True, finite=True)
        positive("sudden", self.sudden, zero=True, most=1.0)
        if not 1 <= self.slowdown < np.inf:
            raise ValueError(f"slowdown must be at least 1 and finite, got {self.slowdown}")

    def draw(self, units: int, ranks: int, seed: int = 0) -> NDArray[np.float64]:
        """[units, ranks] seconds.

        Example:
            >>> Delays(0.1, slow_rank=2).draw(1000, 3).mean(0).round(2).tolist()
            [0.1, 0.1, 0.3]
        """
        positive_int("units", units)
        positive_int("ranks", ranks)
        if self.slow_rank is not None and not 0 <= self.slow_rank < ranks:
            raise ValueError(f"slow_rank must be one of {ranks} ranks or None, got {self.slow_rank}")
        draw = np.random.default_rng(seed)
        drawn = np.maximum(draw.normal(self.base_s, self.spread * self.base_s, (units, ranks)), self.base_s / 2)
        slow = draw.random((units, ranks)) < self.sudden
        if self.slow_rank is not None:
            slow[:, self.slow_rank] = True
        return np.where(slow, self.slowdown * drawn, drawn)

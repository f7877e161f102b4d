"""Training on machines that come and go: a run of fixed size, or one that shrinks and grows, replayed on a trace.

A trace says when nodes were added and removed. A run holds up to ``wanted`` of those that are there and works while it
holds ``least`` or more: equal numbers are a run of fixed size, a smaller ``least`` is an elastic one. Work is counted
in node-seconds, so a step of fewer nodes is a smaller batch. What a run does not use it gives back and does not pay.
Whoever removes a node takes one at random of those that are there, ours or not. A checkpoint counts once it is written.
Not modelled: what a changing batch does to the loss, a price that moves, and a market that notices our demand.

Sources of the traces (`data/spot_traces.csv`): Thorpe et al. 2023 (Bamboo, NSDI), Wu et al. 2024 (NSDI, spot traces).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from tq.systems import tables
from tq.systems.arguments import positive, positive_int

COLUMNS = ("trace", "seconds", "added", "removed", "source")


@dataclass(frozen=True)
class Trace:
    """When nodes came and went. ``events`` are (seconds, added, removed), in order; the last one ends the trace."""

    name: str
    events: tuple[tuple[float, int, int], ...]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.events[-1][0]

    @property
    def most(self) -> int:
        """The largest number of nodes that were there at a time."""
        return int(np.cumsum([added - removed for _, added, removed in self.events]).max())

    @property
    def node_seconds(self) -> float:
        """Of all nodes, while they were there."""
        there = np.cumsum([added - removed for _, added, removed in self.events])[:-1]
        return float((there * np.diff([time for time, _, _ in self.events])).sum())


@dataclass(frozen=True)
class Job:
    """How a run uses the nodes of a trace; all times in seconds.

    Attributes:
        wanted: nodes that it holds at most.
        least: nodes that it works with at least; None: ``wanted``, a run of fixed size.
        interval_s: of work between two checkpoints.
        write_s: that a checkpoint stops it.
        restart_s: from a change of its nodes to the next step.
        patience_s: that it waits after a change before it grows again.
        warned: whether it is told of a removal early enough to write a checkpoint, and so loses no work. The write is
            charged to the nodes that stay.
        holds: whether it keeps, and pays, the nodes that are there while they are too few to work.
    """

    wanted: int
    least: int | None = None
    interval_s: float = 1800.0
    write_s: float = 30.0
    restart_s: float = 300.0
    patience_s: float = 0.0
    warned: bool = False
    holds: bool = False

    def __post_init__(self) -> None:
        positive_int("wanted", self.wanted)
        if self.least is not None:
            positive_int("least", self.least)
            if self.least > self.wanted:
                raise ValueError(f"least={self.least} is more than wanted={self.wanted}")
        positive("interval_s", self.interval_s)
        for name in ("write_s", "restart_s", "patience_s"):
            positive(name, getattr(self, name), zero=True)


@dataclass(frozen=True)
class Outcome:
    """What came of a run: node-seconds ``paid`` and of useful ``work``, ``seconds`` of the trace, and how often a
    removal hit it (``hits``)."""

    paid: float
    work: float
    seconds: float
    hits: float

    @property
    def useful(self) -> float:
        """Share of what is paid that is work; 0 where nothing is paid."""
        return self.work / self.paid if self.paid else 0.0

    @property
    def mean_nodes(self) -> float:
        """Nodes that would do the same work in the same time if they were never interrupted."""
        return self.work / self.seconds


@cache
def traces() -> dict[str, Trace]:
    """The recorded traces by name.

    Raises:
        ValueError: where the table is broken.

    Example:
        >>> len(traces()), traces()["bamboo-p3"].most
        (8, 32)
    """
    path = tables.folder() / "spot_traces.csv"
    events: dict[str, list[tuple[float, int, int]]] = {}
    for line, row in enumerate(tables.read(path, COLUMNS), start=2):
        time, added, removed = (tables.number(path, line, name, row[name]) for name in ("seconds", "added", "removed"))
        of = events.setdefault(row["trace"], [])
        if not row["source"] or (of and time <= of[-1][0]):
            raise ValueError(f"{path.name}, row {line}: a source, and seconds that grow, are needed")
        of.append((time, int(added), int(removed)))
    return {name: Trace(name, tuple(of)) for name, of in events.items()}


class _Run:
    """One replay; times in seconds."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.draw = job, np.random.default_rng(seed)
        self.least = job.wanted if job.least is None else job.least
        self.there = self.held = self.hits = 0
        self.now = self.ready = 0.0  # until ready it restarts
        self.changed = -np.inf
        self.phase = 0.0  # of a cycle of work and checkpoint
        self.paid = self.work = 0.0  # node-seconds
        self.writing, self.written = 0.0, 0.0  # of work in a checkpoint that is being written; until when

    def until(self, time: float) -> None:
        """Work, and pay, until then."""
        self.paid += self.held * (time - self.now)
        if self.writing and time >= self.written:
            self.keep()
        if self.held >= self.least and time > max(self.now, self.ready):
            worked = self.phase + time - max(self.now, self.ready)
            cycles, self.phase = divmod(worked, self.job.interval_s + self.job.write_s)
            self.work += cycles * self.job.interval_s * self.held
        self.now = time

    def event(self, added: int, removed: int) -> None:
        """Nodes leave, and others come."""
        hit = bool(removed) and self.draw.hypergeometric(self.held, self.there - self.held, removed) > 0
        self.there += added - removed
        if hit:
            self.hits += self.held >= self.least
            self.write()
            if self.job.warned:
                self.keep()
            self.writing = 0.0
            self.take(self.job.write_s if self.job.warned else 0.0)
        elif self.grows_at() <= self.now:
            self.grow()

    def grows_at(self) -> float:
        """When it takes more of what is there: never where there is no more, at once while it does not work."""
        if self.could() <= self.held:
            return np.inf
        return self.now if self.held < self.least else self.changed + self.job.patience_s

    def could(self) -> int:
        """Nodes that it would hold of those that are there."""
        most = min(self.there, self.job.wanted)
        return most if most >= self.least or self.job.holds else 0

    def grow(self) -> None:
        """Take more; a run that has something to lose writes a checkpoint first."""
        self.write()
        seconds = self.job.write_s if self.writing else 0.0
        self.written = self.now + seconds
        self.take(seconds)

    def write(self) -> None:
        """Put what was worked since the last checkpoint into one that is being written."""
        self.writing += min(self.phase, self.job.interval_s) * self.held
        self.phase = 0.0

    def keep(self) -> None:
        """What was being written is written."""
        self.work += self.writing
        self.writing = 0.0

    def take(self, seconds: float) -> None:
        """Start again on what is there, after so many seconds of writing."""
        self.held, self.phase, self.changed = self.could(), 0.0, self.now
        self.ready = self.now + seconds + self.job.restart_s


def replay(trace: Trace, job: Job, *, draws: int = 20, seed: int = 0) -> Outcome:
    """What a run gets done on a trace, in the mean over which nodes are taken away.

    Args:
        trace: of nodes that come and go.
        job: how the run uses them.
        draws: of the nodes that are removed; one is enough where ``wanted`` is all that ever are there.
        seed: of the draws.

    Raises:
        ValueError: for a job that no run can be.

    Example:
        >>> from dataclasses import replace
        >>> trace = Trace("two, then one", ((0, 2, 0), (1000, 0, 1), (2000, 0, 0)))
        >>> job = Job(2, 1, interval_s=100, write_s=0, restart_s=0)
        >>> replay(trace, job, draws=1).work, replay(trace, replace(job, least=2), draws=1).work
        (3000.0, 2000.0)
    """
    positive_int("draws", draws)
    found = []
    for number in range(draws):
        run = _Run(job, seed + number)
        for time, added, removed in trace.events:
            if run.now < (grows_at := run.grows_at()) < time:
                run.until(grows_at)
                run.grow()
            run.until(time)
            run.event(added, removed)
        run.write()
        run.keep()
        found.append((run.paid, run.work, run.hits))
    paid, work, hits = (float(each) for each in np.mean(found, axis=0))
    return Outcome(paid, work, trace.seconds, hits)

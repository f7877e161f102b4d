"""Simulations of events on several processors, which must end as if one processor had taken all events in order.

Three engines run one model, PHOLD: objects that, for each event, change their state and send one event on, to another
object and into the future by at least the *look-ahead*. ``sequential`` takes events from one heap. ``conservative``
takes windows: all processors agree on the earliest event (a barrier), and what lies within the look-ahead of it is
safe. ``optimistic`` (Time Warp) lets every processor go on alone; an event that arrives late rolls its object back, and
what was sent in error is cancelled by anti-messages. Nothing before the earliest event anywhere (global virtual time)
can be rolled back, so that much is committed. An object's next state depends on the order of its events, so an engine
that takes two of them in the wrong order ends with another trace.

The processors are virtual: in a round each takes one event, a message arrives in the next round. A rollback costs what
it undoes and no time of its own.

Sources: Fujimoto 1990 (Performance of Time Warp under Synthetic Workloads) for PHOLD; Jefferson 1985 (Virtual Time);
Nicol 1993 (The Cost of Conservative Synchronization) for windows; Toroczkai et al. 2000 (Extremal-point Densities).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import positive, positive_int

_MASK = (1 << 64) - 1
Event = tuple[float, int, int]  # time, key (unique), object


def _mix(x: int) -> int:
    """splitmix64: 64 bits that depend on all bits of x."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Phold:
    """The model. Delays are look-ahead + (1 - look-ahead) * an exponential number of mean 1, so their mean is 1.

    Attributes:
        objects: how many, 2 to 16,384.
        population: events per object that are under way at any time.
        end: of the simulation; about objects * population * end events.
        lookahead: least delay of an event, in [0, 1].
        remote: share of events that go to an object chosen from all; the others stay.
        seed: of the first events.
    """

    objects: int = 64
    population: int = 4
    end: float = 10.0
    lookahead: float = 0.1
    remote: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        positive_int("objects", self.objects, 2)
        positive_int("population", self.population)
        positive("end", self.end, finite=True)
        if self.objects > 1 << 14:
            raise ValueError(f"objects must be at most 16,384, got {self.objects}")
        for name in ("lookahead", "remote"):
            positive(name, getattr(self, name), zero=True, most=1.0)

    def first(self) -> list[Event]:
        """The events that start it, by time."""
        found = []
        for number in range(self.objects * self.population):
            key = _mix((self.seed << 32) + number + 1)
            time = -math.log(((_mix(key) >> 24) + 0.5) / (1 << 40))
            if time < self.end:
                found.append((time, key, number % self.objects))
        return sorted(found)

    def handle(self, state: int, event: Event) -> tuple[int, Event | None]:
        """(next state of the object, the event that it sends, None where that lies beyond the end)."""
        time, key, at = event
        state = _mix(state + key & _MASK)
        draw = _mix(state ^ key)
        later = time + self.lookahead - (1 - self.lookahead) * math.log(((draw >> 24) + 0.5) / (1 << 40))
        if later >= self.end:
            return state, None
        goes = (draw & 1023) < 1024 * self.remote
        return state, (later, draw, (draw >> 10 & 0x3FFF) % self.objects if goes else at)


@dataclass(frozen=True)
class Trace:
    """What an engine did.

    Attributes:
        committed: all events by time, as (times float64 [e], keys uint64 [e], objects int64 [e]).
        states: of the objects at the end.
        processors: that took part.
        handled: events taken, those that were undone included.
        rounds: of the machine, an event per processor each; for windows, of the busiest processor of every window.
        barriers: agreements on a time by all processors.
        messages: events and anti-messages between processors.
        anti: of these and of those within a processor, anti-messages.
        rollbacks: times that an object was set back.
    """

    committed: tuple[NDArray[np.float64], NDArray[np.uint64], NDArray[np.int64]]
    states: tuple[int, ...]
    processors: int = 1
    handled: int = 0
    rounds: int = 0
    barriers: int = 0
    messages: int = 0
    anti: int = 0
    rollbacks: int = 0

    @property
    def events(self) -> int:
        """Committed events."""
        return len(self.committed[0])

    @property
    def digest(self) -> str:
        """Of all committed events in order and of the states at the end: equal for engines that agree."""
        found = hashlib.blake2b(digest_size=16)
        for part in self.committed:
            found.update(part.tobytes())
        found.update(b"".join(state.to_bytes(8, "little") for state in self.states))
        return found.hexdigest()

    @property
    def kept(self) -> float:
        """Share of the handled events that were not undone."""
        return self.events / self.handled if self.handled else 1.0

    def efficiency(self, barrier: float = 0.0) -> float:
        """Committed events per processor and round, if a barrier takes as long as so many events."""
        positive("barrier", barrier, zero=True, finite=True)
        return self.events / (self.processors * (self.rounds + barrier * self.barriers)) if self.rounds else 1.0


def _arrays(found: list[Event]) -> tuple[NDArray[np.float64], NDArray[np.uint64], NDArray[np.int64]]:
    found.sort()
    times, keys, objects = zip(*found, strict=True) if found else ((), (), ())
    return np.array(times, np.float64), np.array(keys, np.uint64), np.array(objects, np.int64)


def sequential(model: Phold) -> Trace:
    """One processor, one heap: what the others must equal.

    Example:
        >>> 2200 < sequential(Phold(64, 4, end=10.0)).events < 2900
        True
    """
    heap, states, found = model.first(), [0] * model.objects, list[Event]()
    handle = model.handle
    while heap:
        event = heappop(heap)
        at = event[2]
        states[at], sent = handle(states[at], event)
        found.append(event)
        if sent is not None:
            heappush(heap, sent)
    return Trace(_arrays(found), tuple(states), 1, len(found), len(found))


def _home(model: Phold, processors: int) -> list[int]:
    """The processor of every object: neighbours together."""
    positive_int("processors", processors)
    if processors > model.objects:
        raise ValueError(f"processors must be at most objects={model.objects}, got {processors}")
    return [number * processors // model.objects for number in range(model.objects)]


def conservative(model: Phold, processors: int) -> Trace:
    """Windows of one look-ahead from the earliest event on, with a barrier before each.

    Raises:
        ValueError: for a model without look-ahead, in which no event but the earliest is safe.

    Example:
        >>> model = Phold(16, 4, end=5.0)
        >>> conservative(model, 4).digest == sequential(model).digest
        True
    """
    home = _home(model, processors)
    if not model.lookahead:
        raise ValueError("lookahead must be positive: without it no two events are safe at once")
    heaps: list[list[Event]] = [[] for _ in range(processors)]
    for event in model.first():
        heaps[home[event[2]]].append(event)  # in order, so each is a heap
    states, found, handle = [0] * model.objects, list[Event](), model.handle
    rounds = barriers = messages = 0
    while any(heaps):
        earliest = min(heap[0][0] for heap in heaps if heap)
        safe, busiest, waiting = earliest + model.lookahead, 0, list[Event]()
        for number, heap in enumerate(heaps):
            before = len(found)
            while heap and heap[0][0] < safe:
                event = heappop(heap)
                at = event[2]
                states[at], sent = handle(states[at], event)
                found.append(event)
                if sent is not None:
                    waiting.append(sent)
                    messages += home[sent[2]] != number
            busiest = max(busiest, len(found) - before)
        for sent in waiting:  # none of them lies in this window
            heappush(heaps[home[sent[2]]], sent)
        rounds, barriers = rounds + busiest, barriers + 1
    return Trace(_arrays(found), tuple(states), processors, len(found), rounds, barriers, messages)


@dataclass(slots=True)
class _Done:
    """An event that an object has taken and may have to take back."""

    event: Event
    before: int  # state of the object
    sent: Event | None


class _TimeWarp:
    """The processors with their objects. A message is (event, whether it cancels)."""

    def __init__(self, model: Phold, processors: int) -> None:
        self.model, self.home = model, _home(model, processors)
        self.heaps: list[list[Event]] = [[] for _ in range(processors)]
        for event in model.first():
            self.heaps[self.home[event[2]]].append(event)
        self.done: list[deque[_Done]] = [deque() for _ in range(model.objects)]
        self.states = [0] * model.objects
        self.cancelled: Counter[int] = Counter()  # keys of events that are still in a heap
        self.under_way: list[tuple[Event, bool]] = []
        self.found: list[Event] = []
        self.handled = self.rounds = self.barriers = self.messages = self.anti = self.rollbacks = 0

    def deliver(self) -> None:
        """Everything that was sent to another processor in the last round."""
        arrived, self.under_way = self.under_way, []
        for event, cancels in arrived:
            self.receive(event, cancels)

    def receive(self, event: Event, cancels: bool) -> None:
        """An event or an anti-message at its object, with all that is undone on this processor."""
        local = [(event, cancels)]
        while local:
            event, cancels = local.pop()
            at = event[2]
            done = self.done[at]
            late = bool(done) and done[-1].event >= event
            if late:
                self.roll_back(event, cancels, local)
            elif cancels:
                self.cancelled[event[1]] += 1
            if not cancels:
                heappush(self.heaps[self.home[at]], event)

    def roll_back(self, event: Event, cancels: bool, local: list[tuple[Event, bool]]) -> None:
        """Set the event's object back to before it; what it sent since is cancelled."""
        at, self.rollbacks = event[2], self.rollbacks + 1
        done, home = self.done[at], self.home[at]
        while done and done[-1].event >= event:
            undone = done.pop()
            self.states[at] = undone.before
            if not (cancels and undone.event == event):
                heappush(self.heaps[home], undone.event)
            if undone.sent is not None:
                self.anti += 1
                if self.home[undone.sent[2]] == home:
                    local.append((undone.sent, True))
                else:
                    self.messages += 1
                    self.under_way.append((undone.sent, True))

    def next_of(self, number: int) -> Event | None:
        """The earliest event of a processor that was not cancelled."""
        heap, cancelled = self.heaps[number], self.cancelled
        while heap:
            if cancelled and cancelled[heap[0][1]]:
                key = heappop(heap)[1]
                cancelled[key] -= 1
                if not cancelled[key]:
                    del cancelled[key]
            else:
                return heap[0]
        return None

    def round(self, most: float) -> None:
        """Every processor takes one event, if it has one before ``most``."""
        self.deliver()
        self.rounds += 1
        for number, heap in enumerate(self.heaps):
            event = self.next_of(number)
            if event is None or event[0] >= most:
                continue
            heappop(heap)
            at = event[2]
            before = self.states[at]
            self.states[at], sent = self.model.handle(before, event)
            self.done[at].append(_Done(event, before, sent))
            self.handled += 1
            if sent is not None:
                if self.home[sent[2]] == number:
                    self.receive(sent, False)
                else:
                    self.messages += 1
                    self.under_way.append((sent, False))

    def commit(self) -> float:
        """Global virtual time; what lies before it is committed. Infinite at the end."""
        self.barriers += 1
        times = [event[0] for number in range(len(self.heaps)) if (event := self.next_of(number)) is not None]
        earliest = min(times + [event[0] for event, _ in self.under_way], default=math.inf)
        for done in self.done:
            while done and done[0].event[0] < earliest:
                self.found.append(done.popleft().event)
        return earliest


def optimistic(model: Phold, processors: int, window: float = math.inf, commit_every: int = 64) -> Trace:
    """Time Warp.

    Args:
        model: of what is simulated; look-ahead is not needed.
        processors: virtual ones.
        window: how far beyond global virtual time an event may be taken; inf does not hold anybody back.
        commit_every: rounds from one global virtual time to the next.

    Example:
        >>> model = Phold(16, 4, end=5.0, lookahead=0.0)
        >>> found = optimistic(model, 4)
        >>> found.digest == sequential(model).digest, found.rollbacks > 0
        (True, True)
    """
    positive("window", window)
    positive_int("commit_every", commit_every)
    machine = _TimeWarp(model, processors)
    virtual = machine.commit()
    while virtual < math.inf:
        for _ in range(commit_every):
            machine.round(virtual + window)
            if not machine.under_way and not any(machine.heaps):
                break
        virtual = machine.commit()
    return Trace(
        _arrays(machine.found), tuple(machine.states), processors, machine.handled, machine.rounds, machine.barriers,
        machine.messages, machine.anti, machine.rollbacks,
    )  # fmt: skip


@dataclass(frozen=True)
class Horizon:
    """Processors on a ring after many rounds: the share that could go on, and the spread of their local times."""

    utilisation: float
    width: float


def horizon(sites: int, rounds: int, warm: int = 0, seed: int = 0, replicas: int = 1) -> Horizon:
    """A conservative simulation without windows: sites on a ring, one on each processor, exponential steps.

    In a round a site goes on if its local time is not later than both neighbours'. The share that goes on does not fall
    to nothing with more processors: it tends to 24.6 %, for any number of them.

    Args:
        sites: on the ring, at least 3.
        rounds: counted, after ``warm`` others.
        warm: rounds before; local times roughen for long on large rings.
        seed: of the steps.
        replicas: rings beside each other; both results are means over them.

    Example:
        >>> abs(horizon(1000, 500, 500).utilisation - 0.2465) < 0.005
        True
    """
    positive_int("sites", sites, 3)
    positive_int("rounds", rounds)
    positive_int("warm", warm, 0)
    positive_int("replicas", replicas)
    draw = np.random.default_rng(seed)
    time = np.zeros((replicas, sites))
    going, width = 0.0, 0.0
    for number in range(warm + rounds):
        goes = (time <= np.roll(time, 1, 1)) & (time <= np.roll(time, -1, 1))
        if number >= warm:
            going += float(goes.mean())
            width += float(time.std(1).mean())
        time[goes] += draw.standard_exponential(int(goes.sum()))
    return Horizon(going / rounds, width / rounds)

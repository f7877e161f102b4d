"""Memories of several speeds: which accesses miss under a policy, how moving hides behind computing, how a drive wears.

A trace is a sequence of block numbers, a capacity a number of blocks that fit. What misses is counted exactly; time is
modelled. Not modelled: associativity, blocks of several sizes, and a disk that slows down as it fills.

Sources: Belady 1966 (optimal eviction); Mattson et al. 1970 (stack algorithms); `gemini/placement_policy.py` of
ColossalAI, which evicts what is used last in the step that it recorded first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq.systems.arguments import Real, boolean, one_of, positive, positive_int

Trace = Sequence[int] | NDArray[Any]
#: lru, mru: least and most recently used; lfu: least often used, ties the least recently; belady: whose next use is
#: farthest, which is optimal; gemini: likewise, but nothing is known beyond the end of the step.
POLICIES = ("lru", "mru", "lfu", "belady", "gemini")
NEVER = np.iinfo(np.int64).max


# --- traces ---
def cyclic(blocks: int, rounds: int = 1) -> NDArray[np.int64]:
    """0, 1, … n-1, over and over."""
    _counts(blocks=blocks, rounds=rounds)
    return np.tile(np.arange(blocks), rounds)


def sawtooth(blocks: int, rounds: int = 1) -> NDArray[np.int64]:
    """0 … n-1, n-1 … 0, over and over: forward and backward through the layers, with the update in the second."""
    _counts(blocks=blocks, rounds=rounds)
    there = np.arange(blocks)
    return np.tile(np.concatenate([there, there[::-1]]), rounds)


def with_sweep(blocks: int, rounds: int = 1) -> NDArray[np.int64]:
    """As ``sawtooth``, with an optimizer after it that goes through the layers once more, from the first on."""
    _counts(blocks=blocks, rounds=rounds)
    there = np.arange(blocks)
    return np.tile(np.concatenate([there, there[::-1], there]), rounds)


def _counts(**given: int) -> None:
    for name, value in given.items():
        positive_int(name, value)


# --- policies ---
@dataclass(frozen=True)
class Replay:
    """What a policy made of a trace. missed: bool [n]; place: int64 [n], the slot of the capacity that each access
    finds its block in, so that a real pool can do the same."""

    missed: NDArray[np.bool_]
    place: NDArray[np.int64]

    @property
    def share(self) -> float:
        """Share of the accesses that missed."""
        return float(self.missed.mean()) if len(self.missed) else 0.0


def next_uses(trace: Trace, step: int | None = None) -> NDArray[np.int64]:
    """For each access, when its block is used next; ``NEVER`` if it is not, or not within the same step.

    step: accesses of a step; None looks to the end.
    """
    blocks = _blocks(trace)
    after: NDArray[np.int64] = np.full(len(blocks), NEVER)
    known: dict[int, int] = {}
    for at in range(len(blocks) - 1, -1, -1):
        if step is not None and (at + 1) % step == 0:
            known.clear()
        after[at] = known.get(int(blocks[at]), NEVER)
        known[int(blocks[at])] = at
    return after


def _blocks(trace: Trace) -> NDArray[np.int64]:
    blocks = np.asarray(trace)
    if blocks.ndim != 1 or (len(blocks) and (blocks.dtype.kind not in "iu" or blocks.min() < 0)):
        raise ValueError(f"trace must be a sequence of block numbers, 0 or more; got {trace!r:.60}")
    return blocks.astype(np.int64)


def replay(trace: Trace, capacity: int, policy: str, step: int | None = None) -> Replay:
    """Which accesses of a trace miss in a memory of so many blocks that is empty at first.

    step: accesses of a step, which "gemini" needs and the others do not.
    """
    blocks = _blocks(trace)
    positive_int("capacity", capacity)
    one_of("policy", policy, POLICIES)
    if policy == "gemini":
        if step is None:
            raise ValueError("policy 'gemini' needs step, the accesses of a step")
        positive_int("step", step)
    if policy in ("lru", "mru"):
        return _by_recency(blocks, capacity, newest=policy == "mru")
    after = next_uses(blocks, step if policy == "gemini" else None) if policy != "lfu" else None
    return _by_rank(blocks, capacity, after)


def _by_recency(blocks: NDArray[np.int64], capacity: int, newest: bool) -> Replay:
    held: OrderedDict[int, int] = OrderedDict()  # the newest last
    missed, place = np.zeros(len(blocks), bool), np.zeros(len(blocks), np.int64)
    for at, block in enumerate(blocks.tolist()):
        slot = held.pop(block, None)
        if slot is None:
            missed[at] = True
            slot = held.popitem(last=newest)[1] if len(held) == capacity else len(held)
        held[block] = place[at] = slot
    return Replay(missed, place)


def _by_rank(blocks: NDArray[np.int64], capacity: int, after: NDArray[np.int64] | None) -> Replay:
    """Evicts the block of the least rank: (uses, last use) for LFU, -(next use) where the future is known, and of
    those that are not used again the highest number. Ranks that have changed stay in the heap until they come up."""
    missed, place = np.zeros(len(blocks), bool), np.zeros(len(blocks), np.int64)
    slots: dict[int, int] = {}
    rank: dict[int, tuple[int, int]] = {}
    uses: dict[int, int] = {}
    heap: list[tuple[tuple[int, int], int]] = []
    for at, block in enumerate(blocks.tolist()):
        if block not in slots:
            missed[at] = True
            slots[block] = _evict(heap, rank, slots) if len(slots) == capacity else len(slots)
        uses[block] = uses.get(block, 0) + 1
        rank[block] = (uses[block], at) if after is None else (-int(after[at]), -block)
        heapq.heappush(heap, (rank[block], block))
        place[at] = slots[block]
    return Replay(missed, place)


def _evict(
    heap: list[tuple[tuple[int, int], int]], rank: dict[int, tuple[int, int]], slots: dict[int, int]
) -> int:
    while True:
        found, block = heapq.heappop(heap)
        if block in slots and rank[block] == found:
            return slots.pop(block)


def steady_misses(trace: Trace, capacity: int, policy: str, warm: int = 4, rounds: int = 24) -> float:
    """Misses of one round of a trace that is repeated, in the mean of ``rounds`` rounds after ``warm`` others."""
    blocks = _blocks(trace)
    _counts(warm=warm, rounds=rounds)
    found = replay(np.tile(blocks, warm + rounds), capacity, policy, len(blocks))
    return float(found.missed[warm * len(blocks) :].sum() / rounds)


def least_misses(trace: Trace, capacity: int) -> int:
    """The fewest misses that any eviction can have, by trying all: for traces of a few accesses."""
    blocks = _blocks(trace).tolist()
    positive_int("capacity", capacity)
    states = {frozenset[int](): 0}
    for block in blocks:
        new: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            if block in held:
                choices: Iterable[frozenset[int]] = (held,)
            elif len(held) < capacity:
                choices = (held | {block},)
            else:
                choices = [held - {old} | {block} for old in held]
            for choice in choices:
                new[choice] = min(new.get(choice, len(blocks)), misses + (block not in held))
        states = new
    return min(states.values())


def accesses_s(share: Real, hit_s: Real, miss_s: Real) -> Real:
    """Mean seconds of an access of which such a share misses; miss_s: of a miss, all of it."""
    positive("share", share, zero=True, most=1.0)
    positive("hit_s", hit_s, zero=True, finite=True)
    positive("miss_s", miss_s, zero=True, finite=True)
    return hit_s * (1 - share) + miss_s * share


def ahead_s(share: Real, compute_s: Real, miss_s: Real) -> Real:
    """Mean seconds of an access whose misses are read while the blocks before it are computed on."""
    positive("share", share, zero=True, most=1.0)
    positive("compute_s", compute_s, zero=True, finite=True)
    positive("miss_s", miss_s, zero=True, finite=True)
    return np.maximum(compute_s, share * miss_s)


# --- a stream through a small memory ---
def pipeline_s(read_s: Trace, compute_s: Trace, write_s: Trace, buffers: int) -> float:
    """Seconds until all of a sequence was read, computed on and written, each in order and beside the other two.

    An item takes a buffer from the beginning of its reading to the end of its writing.
    """
    positive_int("buffers", buffers)
    items = [np.asarray(x, float) for x in (read_s, compute_s, write_s)]
    if len({x.shape for x in items}) != 1 or items[0].ndim != 1:
        raise ValueError(f"read_s, compute_s and write_s must be of one length, got {[x.shape for x in items]}")
    for name, x in zip(("read_s", "compute_s", "write_s"), items, strict=True):
        positive(name, x, zero=True, finite=True)
    freed: list[float] = []
    read = computed = written = 0.0
    for at, (there, work, back) in enumerate(zip(*items, strict=True)):
        read = max(read, freed[at - buffers] if at >= buffers else 0.0) + there
        computed = max(computed, read) + work
        written = max(written, computed) + back if back else written
        freed.append(written if back else computed)
    return float(max(computed, written))


@dataclass(frozen=True)
class Streamed:
    """A step of a model whose layers pass through memory, the update inside the backward pass.

    layers, parameters: of the model, and of one layer. forward_s, backward_s: of one layer and step, the second with
    its recomputation and update. ends_s: of embedding, loss and their update. weight_bytes, moment_bytes: of one
    parameter as it lies on the disk. both_bytes_per_s: each way, while reads and writes go at once. deferred: gradients
    wait on the disk until their norm is known, and a sweep of update_s a layer follows. resident: layers that stay in
    memory, and are written only if ``kept``. end_bytes: that the ends read, and write, beside layers.
    """

    layers: int
    parameters: Real
    forward_s: float
    backward_s: float
    ends_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    weight_bytes: float = 4.0
    moment_bytes: float = 8.0
    update_s: float = 0.0
    resident: int = 0
    buffers: int = 3
    deferred: bool = False
    kept: bool = True
    input_bytes: float = 0.0
    end_bytes: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        _counts(layers=self.layers, buffers=self.buffers)
        positive("parameters", self.parameters, finite=True)
        for name in ("forward_s", "backward_s", "ends_s", "weight_bytes", "moment_bytes", "update_s", "input_bytes"):
            positive(name, getattr(self, name), zero=True, finite=True)
        for name in ("read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s"):
            positive(name, getattr(self, name), finite=True)
        for name in ("deferred", "kept"):
            boolean(name, getattr(self, name))

    @property
    def _streamed(self) -> int:
        return max(0, self.layers - self.resident)

    def bytes_read(self) -> float:
        """In a step."""
        weights, moments = self.parameters * self.weight_bytes, self.parameters * self.moment_bytes
        layer = 2 * weights + moments + (weights if self.deferred else 0.0)
        gradients = self.layers * self.parameters * 4.0 if self.deferred else 0.0
        return float(self._streamed * layer + gradients + self.layers * self.input_bytes + self.end_bytes[0])

    def bytes_written(self) -> float:
        """In a step."""
        layer = self.parameters * (self.weight_bytes + self.moment_bytes)
        layers = self.layers if self.kept else self._streamed
        gradients = self.layers * self.parameters * 4.0 if self.deferred else 0.0
        return float(layers * layer + gradients + self.layers * self.input_bytes + self.end_bytes[1])

    def seconds(self) -> float:
        """Of a step that begins and ends with nothing under way."""
        weights, moments = self.parameters * self.weight_bytes, self.parameters * self.moment_bytes
        here = [layer < self.resident for layer in range(self.layers)]
        reads = [0.0 if own else weights / self.read_bytes_per_s for own in here]
        spilled = self.input_bytes / self.both_bytes_per_s
        rows = [(there, self.forward_s, spilled) for there in reads]
        rows.append((0.0, self.ends_s, 0.0))
        if self.deferred:
            gradient = self.parameters * 4.0 / self.both_bytes_per_s
            again = [0.0 if own else weights / self.both_bytes_per_s for own in here]
            rows += [(there + spilled, self.backward_s, gradient) for there in reversed(again)]
            rows += [self._moved(own, weights + moments, self.update_s, gradient) for own in here]
        else:
            rows += [self._moved(own, weights + moments, self.backward_s, spilled) for own in reversed(here)]
        ends = [nbytes / self.both_bytes_per_s for nbytes in self.end_bytes]
        rows.append((ends[0], 0.0, ends[1]))
        there, work, back = (np.array(column) for column in zip(*rows, strict=True))
        return pipeline_s(there, work, back, self.buffers)

    def _moved(self, own: bool, nbytes: Real, compute_s: float, more_s: float) -> tuple[float, float, float]:
        both = float(nbytes) / self.both_bytes_per_s
        return (0.0 if own else both) + more_s, compute_s, 0.0 if own and not self.kept else both

    def disk_s(self) -> float:
        """That the transfers alone would take."""
        return self._times(0.0)

    def compute_s(self) -> float:
        """That the computation alone would take."""
        sweep = self.layers * self.update_s if self.deferred else 0.0
        return self.layers * (self.forward_s + self.backward_s) + self.ends_s + sweep

    def _times(self, factor: float) -> float:
        from dataclasses import replace

        scaled = {name: factor * getattr(self, name) for name in ("forward_s", "backward_s", "ends_s", "update_s")}
        return replace(self, **scaled).seconds()

    @property
    def binds(self) -> str:
        """What a step is bound by."""
        return "disk" if self.disk_s() > self.compute_s() else "compute"

    def hides_at(self) -> float:
        """By what factor of these tokens the computation covers the transfers, if it grows in proportion."""
        low, high = 0.0, 1.0
        while self._times(high) > 1.02 * high * self.compute_s() and high < 2**30:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            fits = self._times(middle) <= 1.02 * middle * self.compute_s()
            low, high = (low, middle) if fits else (middle, high)
        return high


# --- wear ---
def steps_of_a_drive(endurance_bytes: Real, written_bytes: Real, amplification: Real = 1.0) -> Real:
    """Steps until a drive has taken the bytes that its maker warrants (TBW).

    written_bytes: by a step; amplification: bytes that the drive writes inside for each that it is given, 1 or more.
    """
    positive("endurance_bytes", endurance_bytes)
    positive("written_bytes", written_bytes)
    positive("amplification", amplification, finite=True)
    if np.any(np.asarray(amplification) < 1):
        raise ValueError(f"amplification must be 1 or more, got {amplification}")
    return endurance_bytes / (written_bytes * amplification)


# --- hit rates of a cache of answers ---
def zipf_hit_rate(items: int, held: int, exponent: float, lifetime: float = np.inf) -> float:
    """Share of requests that find their answer held, where item k is asked for in proportion to k**-exponent.

    held: most popular items that are cached; lifetime: requests after which an answer is stale, so that an item whose
    requests are rarer than that seldom hits (Poisson requests; p L / (1 + p L) hits of an item of share p).
    """
    _counts(items=items, held=held)
    positive("exponent", exponent, zero=True, finite=True)
    positive("lifetime", lifetime)
    shares = np.arange(1, items + 1, dtype=float) ** -exponent
    shares /= shares.sum()
    chosen = shares[: min(held, items)]
    fresh = 1.0 if np.isinf(lifetime) else chosen * lifetime / (1 + chosen * lifetime)
    return float((chosen * fresh).sum())


def tiered_cost(hit_rates: Sequence[float], costs: Sequence[float], miss_cost: float) -> float:
    """Mean cost of a request that is looked for in each tier in turn, for what the tiers before it missed.

    hit_rates: of what reaches a tier; costs: of a look into it, paid whether it hits or not.
    """
    if len(hit_rates) != len(costs):
        raise ValueError(f"hit_rates and costs must be of one length, got {len(hit_rates)} and {len(costs)}")
    positive("hit_rates", np.asarray(hit_rates, float), zero=True, most=1.0)
    positive("costs", np.asarray(costs, float), zero=True, finite=True)
    positive("miss_cost", miss_cost, finite=True)
    reaching, total = 1.0, 0.0
    for rate, cost in zip(hit_rates, costs, strict=True):
        total += reaching * cost
        reaching *= 1 - rate
    return total + reaching * miss_cost

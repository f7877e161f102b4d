"""What a training step keeps for backward, what it codes, offloads or computes again: costs and the cheapest choice.

A step is a graph of operations. An operation makes values; backward asks for some of them. Each value that is asked
for is stored in one of several ways (as it is, in few bits, on another device), or its operation runs again. That needs
its sources, stored or computed again in their turn; what runs again runs once and is held until its last use. The
cheapest choice under a budget of bytes is a mixed-integer linear program (HiGHS, through SciPy):

    minimise   sum of seconds of the ways taken and of the operations that run again
    such that  every value that backward asks for, and every source of an operation that runs again, is stored or
               runs again, and the stored bytes fit the budget.

Identical blocks of a model can be tied, so that the program does not grow with the depth. ``enumerated`` finds the same
by trying all choices. Schedules for chains of layers, which may run a layer more than once more, are in
``tq.systems.recompute_chain``.

Sources: Jain et al. 2020 (Checkmate, MLSys), the program without codes; Chen et al. 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tq.systems.arguments import positive

GAP = 1e-4  # of the optimum, at which the search ends
TIME_LIMIT_S = 60.0
KEEP = "keep"
_TIME_IS_UP = 1  # status of ``scipy.optimize.milp``


class Way(NamedTuple):
    """A way to store a value.

    name: ``KEEP``, or that of a code or a place; nbytes: what it takes until backward; seconds: to write and to read;
    lossy: whether it comes back changed; noise: what it adds to the error of the gradient, in a unit of the caller's.
    """

    name: str
    nbytes: int
    seconds: float = 0.0
    lossy: bool = False
    noise: float = 0.0


class Value(NamedTuple):
    """A tensor that an operation makes, or the whole memory that several share.

    nbytes: as it is; ways: to store it, none if it cannot be; asked: whether backward asks for it; operation: that
    makes it; block: of the model, from 0 on (-1 before the first); strict: backward must be given it unchanged, so it
    is not computed again from what comes back changed.
    """

    nbytes: int
    ways: tuple[Way, ...]
    asked: bool
    operation: int
    block: int = 0
    strict: bool = False


class Operation(NamedTuple):
    """seconds: to run it again; None if it must not (random numbers, writes to what others hold); sources: values."""

    seconds: float | None
    sources: tuple[int, ...] = ()


class Choice(NamedTuple):
    """stored: {value: index of its way}; again: operations that run again; seconds and nbytes: what that costs."""

    stored: Mapping[int, int]
    again: frozenset[int]
    seconds: float
    nbytes: int
    noise: float


@dataclass(frozen=True)
class Graph:
    """Operations and values of one step, each in the order in which they come.

    Attributes:
        values, operations: as above; a value's operation comes before those that read the value.
        asks: (node of backward, value) in the order in which backward asks, nodes counted from 0; empty if unknown.

    Raises:
        ValueError: an operation reads a value that does not exist before it, or two ways of a value have one name.

    Example:
        >>> from tq.systems.rematerialization import Graph, Operation, Value, Way, cheapest
        >>> def stored(nbytes, code_s):
        ...     return Way("keep", nbytes), Way("4 bits", nbytes // 4, code_s, lossy=True)
        >>> product = Value(400, stored(400, 3.0), True, 0)
        >>> gelu = Value(400, stored(400, 3.0), True, 1)
        >>> graph = Graph((product, gelu), (Operation(5.0), Operation(1.0, (0,))))
        >>> [cheapest(graph, budget).seconds for budget in (800, 400, 100)]
        [0.0, 1.0, 4.0]
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    asks: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for number, operation in enumerate(self.operations):
            for source in operation.sources:
                if not 0 <= source < len(self.values) or self.values[source].operation >= number:
                    raise ValueError(f"operation {number} reads value {source}, which no operation before it makes")
        for number, value in enumerate(self.values):
            if len({way.name for way in value.ways}) < len(value.ways):
                raise ValueError(f"value {number} has two ways of one name")
            if not 0 <= value.operation < len(self.operations):
                raise ValueError(f"value {number} is made by operation {value.operation}, which does not exist")

    @cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Values by the operation that makes them."""
        made: list[list[int]] = [[] for _ in self.operations]
        for number, value in enumerate(self.values):
            made[value.operation].append(number)
        return tuple(map(tuple, made))

    @property
    def nbytes(self) -> int:
        """Bytes of all that backward asks for, kept as they are."""
        return sum(value.nbytes for value in self.values if value.asked)


def settle(graph: Graph, stored: Mapping[int, int]) -> Choice | None:
    """What follows from storing these values: {value: index of its way}. What nobody needs is dropped.

    Returns None where a value is needed that is neither stored nor can be computed again, or that is needed unchanged
    and would not be.
    """
    needed: set[tuple[int, bool]] = set()
    again: set[int] = set()
    exactly: set[int] = set()
    waiting = [(n, value.strict) for n, value in enumerate(graph.values) if value.asked]
    while waiting:
        if (need := waiting.pop()) in needed:
            continue
        needed.add(need)
        value, strict = need
        number = graph.values[value].operation
        if value in stored:
            if strict and graph.values[value].ways[stored[value]].lossy:
                return None
        elif graph.operations[number].seconds is None:
            return None
        else:
            again.add(number)
            exactly |= {number} if strict else set()
            waiting += [(source, strict) for source in graph.operations[number].sources]
    kept = {value: way for value, way in stored.items() if (value, True) in needed or (value, False) in needed}
    ways = [graph.values[value].ways[way] for value, way in kept.items()]
    if any(way.lossy and graph.values[v].operation in exactly for v, way in zip(kept, ways, strict=True)):
        return None  # it would be there twice, changed and unchanged
    seconds = sum(way.seconds for way in ways) + sum(graph.operations[n].seconds or 0.0 for n in sorted(again))
    return Choice(kept, frozenset(again), seconds, sum(w.nbytes for w in ways), sum(w.noise for w in ways))


def peak_by_block(graph: Graph, choice: Choice) -> int:
    """Most bytes at once while backward goes through the blocks from the last to the first, to a block's accuracy.

    While it is in a block, what is stored for this block and those before it is there, and all that is computed again
    or decoded in it. ``tq.systems.backward_timeline`` follows it node by node.
    """
    last = max((value.block for value in graph.values), default=0)
    there = np.zeros(last + 2, np.int64)  # from block -1 on
    for number, value in enumerate(graph.values):
        if number in choice.stored:
            way = value.ways[choice.stored[number]]
            there[value.block + 1 :] += way.nbytes
            there[value.block + 1] += 0 if way.name == KEEP else value.nbytes
        elif value.operation in choice.again:
            there[value.block + 1] += value.nbytes
    return int(there.max())


def _comes_from_before(graph: Graph, operation: int, source: int) -> bool:
    """Whether an operation reads a value of an earlier block."""
    made = graph.made[operation]
    return bool(made) and graph.values[source].block < graph.values[made[0]].block


def is_local(graph: Graph, choice: Choice) -> bool:
    """Whether what runs again in a block starts from what is stored of the blocks before it."""
    return all(
        source in choice.stored or not _comes_from_before(graph, number, source)
        for number in choice.again for source in graph.operations[number].sources
    )  # fmt: skip


def enumerated(graph: Graph, budget: float, *, peak: float | None = None, noise: float | None = None) -> Choice | None:
    """The cheapest choice, by trying all of them: for graphs of a few values. None where none fits."""
    best, options = None, [(None, *range(len(value.ways))) for value in graph.values]
    for ways in product(*options):
        choice = settle(graph, {value: way for value, way in enumerate(ways) if way is not None})
        if choice is None or choice.nbytes > budget or noise is not None and choice.noise > noise:
            continue
        if peak is not None and not (is_local(graph, choice) and peak_by_block(graph, choice) <= peak):
            continue
        if best is None or choice.seconds < best.seconds:
            best = choice
    return best


def cheapest(
    graph: Graph,
    budget: float,
    *,
    peak: float | None = None,
    noise: float | None = None,
    ties: Sequence[int] | None = None,
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
) -> Choice:
    """The choice that costs the fewest seconds.

    Args:
        budget: bytes that may be stored when backward begins.
        peak: bytes that may be there at once in backward, as ``peak_by_block`` counts them; what runs again in a block
            then starts from what is stored of the blocks before it. None is no limit.
        noise: most that the noise of all that is stored may add up to; None is no limit.
        ties: for each operation the number of the operation that stands for it, itself or an earlier one that makes as
            many values: both get the same choice. None ties nothing.
        gap: relative distance from the optimum at which the search may end; 0 proves the optimum.
        time_limit_s: seconds after which the best choice so far is taken.

    Raises:
        ValueError: nothing fits; the message says the least number of bytes that would.
        TimeoutError: the time is up before any choice was found.
    """
    positive("budget", budget, zero=True)
    program = _Program(graph, ties, peak, noise)
    found = program.solve(budget, gap, time_limit_s)
    if found is None:
        least = program.least(time_limit_s)
        if least is None:
            raise ValueError("no choice fits: a value that backward needs cannot be stored within the other limits")
        raise ValueError(
            f"a budget of {budget:,.0f} bytes is too small: the least that this step can keep is {least:,}"
        )
    return found


def least_bytes(graph: Graph, *, peak: float | None = None, noise: float | None = None) -> int | None:
    """Fewest bytes that a step can keep, at any cost in time; None where no choice fits the other limits."""
    return _Program(graph, None, peak, noise).least(TIME_LIMIT_S)


class _Program:
    """The linear program. Columns: ways of values, operations that run again, and those that do so from sources that
    are unchanged; tied ones once."""

    def __init__(self, graph: Graph, ties: Sequence[int] | None, peak: float | None, noise: float | None) -> None:
        self.graph = graph
        self.operation_of = list(range(len(graph.operations))) if ties is None else list(ties)
        self.stands = self._values_stand()
        self.columns: dict[tuple[Any, ...], int] = {}
        for number, value in enumerate(graph.values):
            for way in range(len(value.ways)):
                self._column("store", self.stands[number], way)
        self.ways, self.local = len(self.columns), peak is not None
        exact = self._exact()
        for number, operation in enumerate(graph.operations):
            if operation.seconds is not None:
                self._column("again", self.operation_of[number])
                if number in exact:
                    self._column("exactly", self.operation_of[number])
        self.rows: dict[tuple[Any, ...], float] = {}  # of coefficients: least sum
        self.most: list[tuple[np.ndarray, float]] = []
        self._needs()
        self.nbytes = self._sum(lambda value, way: way.nbytes)
        if noise is not None:
            self.most.append((self._sum(lambda value, way: way.noise), noise))
        if peak is not None:
            self._peaks(peak)

    def _values_stand(self) -> list[int]:
        stands = list(range(len(self.graph.values)))
        for number, other in enumerate(self.operation_of):
            if other == number:
                continue
            for value, leader in zip(self.graph.made[number], self.graph.made[other], strict=True):
                names = [[way.name for way in self.graph.values[v].ways] for v in (value, leader)]
                if names[0] != names[1]:
                    raise ValueError(f"operation {number} is tied to {other}, whose values have other ways")
                stands[value] = leader
        return stands

    def _exact(self) -> set[int]:
        """Operations that could have to run again from unchanged sources. Where nothing changes none needs a column."""
        values = self.graph.values
        if not any(way.lossy for value in values for way in value.ways):
            return set()
        found: set[int] = set()
        waiting = [value.operation for value in values if value.asked and value.strict]
        while waiting:
            if (number := waiting.pop()) not in found and self.graph.operations[number].seconds is not None:
                found.add(number)
                waiting += [values[source].operation for source in self.graph.operations[number].sources]
        return found

    def _column(self, *key: Any) -> int:
        return self.columns.setdefault(key, len(self.columns))

    def _available(self, value: int, exactly: bool) -> dict[int, float]:
        """Coefficients of the columns that make a value available."""
        ways, operation = self.graph.values[value].ways, self.operation_of[self.graph.values[value].operation]
        columns = [
            self.columns["store", self.stands[value], n] for n, way in enumerate(ways) if not (exactly and way.lossy)
        ]
        again = self.columns.get(("exactly" if exactly else "again", operation))
        return dict.fromkeys([*columns, *([] if again is None else [again])], 1.0)

    def _need(self, row: dict[int, float], least: float) -> None:
        self.rows[tuple(sorted(row.items()))] = least

    def _needs(self) -> None:
        any_exact = any(key[0] == "exactly" for key in self.columns)
        for number, value in enumerate(self.graph.values):
            if value.asked:
                lossy = any(way.lossy for way in value.ways)
                self._need(self._available(number, value.strict and (any_exact or lossy)), 1.0)
            made_by = self.operation_of[value.operation]
            if (exactly := self.columns.get(("exactly", made_by))) is not None:
                changed = [self.columns["store", self.stands[number], n] for n, w in enumerate(value.ways) if w.lossy]
                if changed:
                    self._need(dict.fromkeys([exactly, *changed], -1.0), -1.0)
        for kind in ("again", "exactly"):
            for number, operation in enumerate(self.graph.operations):
                runs = self.columns.get((kind, self.operation_of[number]))
                if runs is None or operation.seconds is None:
                    continue
                for source in operation.sources:
                    row = self._available(source, kind == "exactly")
                    if self.local and _comes_from_before(self.graph, number, source):
                        row = {c: x for c, x in row.items() if c < self.ways}
                    if runs not in row:
                        self._need({**row, runs: -1.0}, 0.0)
                if kind == "exactly":
                    self._need({runs: -1.0, self.columns["again", self.operation_of[number]]: 1.0}, 0.0)

    def _sum(self, of: Any) -> np.ndarray:
        total = np.zeros(len(self.columns))
        for number, value in enumerate(self.graph.values):
            for place, way in enumerate(value.ways):
                total[self.columns["store", self.stands[number], place]] += of(value, way)
        return total

    def _peaks(self, peak: float) -> None:
        last = max((value.block for value in self.graph.values), default=0)
        for block in range(-1, last + 1):
            row = self._sum(
                lambda value, way, here=block: way.nbytes * (value.block <= here)
                + value.nbytes * (way.name != KEEP and value.block == here)
            )
            for value in self.graph.values:
                again = self.columns.get(("again", self.operation_of[value.operation]))
                if value.block == block and again is not None:
                    row[again] += value.nbytes
            self.most.append((row, peak))

    def solve(self, budget: float, gap: float, time_limit_s: float) -> Choice | None:
        """The cheapest choice; None where none fits."""
        costs = self._sum(lambda value, way: way.seconds)
        for number, operation in enumerate(self.graph.operations):
            if operation.seconds is not None:
                costs[self.columns["again", self.operation_of[number]]] += operation.seconds
        answer = self._run(costs, [*self.most, (self.nbytes, budget)], gap, time_limit_s)
        return None if answer is None else self._choice(answer)

    def least(self, time_limit_s: float) -> int | None:
        """Fewest stored bytes."""
        answer = self._run(self.nbytes, self.most, 0.0, time_limit_s)
        choice = None if answer is None else self._choice(answer)
        return None if choice is None else choice.nbytes

    def _run(
        self, costs: np.ndarray, most: list[tuple[np.ndarray, float]], gap: float, time_limit_s: float
    ) -> np.ndarray | None:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        if () in self.rows or not self.columns:  # a need that nothing fills
            return None if self.rows else np.zeros(0)
        entries = [(r, c, x) for r, row in enumerate(self.rows) for c, x in row]
        limits = [LinearConstraint(row[None] / max(limit, 1.0), ub=limit / max(limit, 1.0)) for row, limit in most]
        if entries:
            r, c, x = (np.array(part) for part in zip(*entries, strict=True))
            needs = coo_array((x, (r, c)), (len(self.rows), len(self.columns))).tocsr()
            limits.append(LinearConstraint(needs, lb=np.array([*self.rows.values()])))
        scale = costs.max() or 1.0
        found = milp(
            costs / scale, integrality=np.ones(len(costs)), bounds=Bounds(0, 1), constraints=limits,
            options={"mip_rel_gap": gap, "time_limit": time_limit_s},
        )  # fmt: skip
        if found.x is None and found.status == _TIME_IS_UP:
            raise TimeoutError(f"no choice was found within {time_limit_s:g} s, nor that there is none")
        return None if found.x is None else np.round(found.x)

    def _choice(self, answer: np.ndarray) -> Choice | None:
        stored = {}
        for number, value in enumerate(self.graph.values):
            taken = [w for w in range(len(value.ways)) if answer[self.columns["store", self.stands[number], w]]]
            if taken:
                stored[number] = min(taken, key=lambda way, value=value: value.ways[way].nbytes)  # type: ignore[misc]
        return settle(self.graph, stored)

"""Plans: what the step of a model keeps, codes, offloads and computes again under a budget of bytes."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tq.quant.codec import DTYPES, Codec
from tq.systems.backward_timeline import timeline, uses
from tq.systems.rematerialization import GAP, KEEP, Choice, Graph, Way, cheapest, settle
from tq.train.activations import compress_activations as _compress
from tq.train.planned.execution import PlannedActivations
from tq.train.planned.offloading import HOST, Place, offload_name
from tq.train.planned.trace import Kind, Trace, default_loss, now, run_model, trace_step

BITS = (4,)  # that values may be coded in; the chapter activation-memory says what fewer cost
MIN_ELEMENTS = 1024
AGAIN = "computed again"
_MOST_AGAIN_S = 5e-4  # beyond its time alone, that an operation may be found to take
# Blocks are planned for, and the peak is counted node by node: (share of the budget, times the peak a block may take),
# the cheapest first. What is stored less leaves room for what runs again.
_TRIES = tuple((share, 3 * 0.87**step) for share in (1.0, 0.8, 0.6) for step in range(14))


@dataclass(frozen=True)
class Plan:
    """What one step keeps for backward. ``plan_activations`` makes it; it holds no tensors and can be pickled.

    Attributes:
        trace: the step, with all ways to store each value and what they cost.
        choice: the way of each value that is stored, and the operations that run again.
        codec: quantizer, whose bits are those of each value's way.
        offload: folder or "host" that values go to; None where none do.

    Example:
        >>> import torch
        >>> from tq.train.planned import compress_activations, plan_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> batch = torch.ones(256, 64)
        >>> plan = plan_activations(model, batch, 0.5, bits=(), progress=False)
        >>> plan.bytes_before, plan.bytes_after, sorted(plan.bytes_by_way)
        (131072, 65536, ['computed again', 'keep'])
        >>> with compress_activations(plan=plan) as usage:
        ...     loss = model(batch).sum()
        >>> loss.backward()
        >>> usage.stored == plan.bytes_after, usage.most == plan.peak_bytes
        (True, True)
    """

    trace: Trace
    choice: Choice
    codec: Codec
    offload: str | None = None

    @property
    def bytes_before(self) -> int:
        """Bytes that autograd would keep."""
        return self.trace.graph.nbytes

    @property
    def bytes_after(self) -> int:
        """Bytes that are stored when backward begins."""
        return self.choice.nbytes

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes at once in backward, with what is computed again or decoded; gradients are not among them."""
        return max(timeline(self.trace.graph, self.choice), default=0)

    @cached_property
    def uses(self) -> tuple[int, ...]:
        """How often each value is asked for."""
        return tuple(uses(self.trace.graph, self.choice))

    @property
    def seconds(self) -> float:
        """Predicted seconds of a forward and a backward pass."""
        return self.trace.seconds + self.trace.watched_s + self.choice.seconds

    @property
    def overhead(self) -> float:
        """Predicted seconds beyond those of a step that keeps all, over those."""
        return (self.trace.watched_s + self.choice.seconds) / self.trace.seconds

    @cached_property
    def bytes_by_way(self) -> dict[str, int]:
        """Of the bytes that autograd would keep, how many are treated in each way."""
        found: dict[str, int] = {}
        for number, value in enumerate(self.trace.graph.values):
            if value.asked:
                way = self.choice.stored.get(number)
                name = AGAIN if way is None else value.ways[way].name
                found[name] = found.get(name, 0) + value.nbytes
        return found

    def codec_of(self, way: str) -> Codec | None:
        """The quantizer of a way to store a value; None if it has none."""
        return self._coders.get(way)

    @cached_property
    def _coders(self) -> dict[str, Codec]:
        return coders(self.codec)

    def __str__(self) -> str:
        parts = ", ".join(f"{nbytes / 2**20:.1f} MiB {name}" for name, nbytes in sorted(self.bytes_by_way.items()))
        return (
            f"{self.bytes_after / 2**20:.1f} of {self.bytes_before / 2**20:.1f} MiB stored, at most "
            f"{self.peak_bytes / 2**20:.1f} MiB in backward, {self.overhead:.1%} more time predicted ({parts})"
        )


def coders(codec: Codec) -> dict[str, Codec]:
    """The codec in every width, by the name of the way."""
    found = {}
    for bits in range(1, 9):
        scale = torch.float32 if bits > 6 else codec.scale_dtype
        made = dataclasses.replace(codec, bits=bits, scale_dtype=scale, nonfinite="propagate")
        found[f"{bits} bits" if bits > 1 else "1 bit"] = made
    return found


@dataclass
class Prices:
    """Measures once what it costs to store values of each size. seconds: {what: of writing and reading}."""

    codec: Codec
    bits: tuple[int, ...]
    min_elements: int
    offload: str | None
    device: torch.device
    repeats: int
    known: dict[tuple[Any, ...], Way] = field(default_factory=dict)

    def ways(self, nbytes: int, kind: Kind) -> tuple[Way, ...]:
        """All ways to store such a value."""
        found = [Way(KEEP, nbytes)]
        if kind.elements >= self.min_elements and nbytes == kind.elements * kind.dtype.itemsize:
            if kind.tolerant and kind.dtype in DTYPES:
                found += [self._coded(f"{b} bits" if b > 1 else "1 bit", kind) for b in self.bits]
            if self.offload is not None:
                found.append(self._elsewhere(kind))
        return tuple(found)

    def _sample(self, kind: Kind) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        if not kind.dtype.is_floating_point:
            return torch.zeros(kind.elements, dtype=kind.dtype, device=self.device)
        return torch.randn(kind.elements, generator=generator, device=self.device).to(kind.dtype)

    def _coded(self, name: str, kind: Kind) -> Way:
        key = name, kind.dtype, kind.elements
        if key not in self.known:
            x, codec = self._sample(kind), coders(self.codec)[name]
            codes: list[Any] = []
            write = self._timed(lambda: codes.append(codec.encode(x)))
            read = self._timed(lambda: codec.decode(codes[0]))
            error = (codec.decode(codes[0]).float() - x.float()).square().sum() / x.float().square().sum()
            self.known[key] = Way(name, codes[0].nbytes, write + read, True, float(error))
        return self.known[key]

    def _elsewhere(self, kind: Kind) -> Way:
        assert self.offload is not None
        key = self.offload, kind.dtype, kind.elements
        if key not in self.known:
            x, place = self._sample(kind), Place(self.offload)
            taken: list[Any] = [None]

            def write() -> None:
                taken[0] = None
                taken[0] = place.write(x)

            seconds = self._timed(write) + self._timed(lambda: taken[0].read())
            self.known[key] = Way(offload_name(self.offload), 0, seconds)
        return self.known[key]

    def _timed(self, call: Callable[[], Any]) -> float:
        call()
        taken = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return median(taken)


def plan_activations(
    model: nn.Module,
    batch: Any,
    budget: int | float,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    bits: Collection[int] = BITS,
    offload: str | os.PathLike[str] | None = None,
    peak: int | None = None,
    noise: float | None = None,
    codec: Codec | None = None,
    min_elements: int = MIN_ELEMENTS,
    repeats: int = 3,
    progress: bool = True,
) -> Plan:
    """Trace one step of a model, and choose for each tensor that it saves what costs the least time under a budget.

    The step runs ``repeats + 2`` times with all its activations. The plan then serves steps on batches of the same
    shape: ``with compress_activations(plan=plan): loss = ...``, forward pass and loss inside. What a plan computes
    again comes out bit for bit; without codes gradients are those of a step that keeps all.

    Args:
        model: trained on one device. Its blocks are the children of its ``ModuleList`` or ``Sequential``. Parts under
            ``torch.utils.checkpoint(use_reentrant=False)`` stay so; what they keep, their inputs, is planned.
        batch: what the model is called with: a tensor, a tuple of arguments, or a mapping of them by name.
        budget: bytes that may be stored when backward begins, or a float up to 1, the share of what autograd keeps.
        loss: makes a number of what the model returns; None takes a scalar that it returns, else the sum.
        bits: widths, 1-8, that tensors may be coded in; empty codes nothing. Never coded: what backward must have as
            it was, such as results of a softmax and statistics of a norm.
        offload: a folder on a disk, or "host" for values of a GPU, that tensors may go to, while compute waits.
        peak: bytes that activations may take at any moment of backward; None is no limit.
        noise: most that the relative squared errors of all coded tensors may add up to; None is no limit.
        codec: quantizer; its bits are ignored. None: blocks of 128, unbiased, bfloat16 scales.
        min_elements: smaller tensors are neither coded nor offloaded.
        repeats: of every timing.
        progress: whether a bar shows the tracing.

    Returns:
        Plan. ``print(plan)`` says in a line what it does.

    Raises:
        TypeError: the model is sharded (FSDP2, tensor parallelism) or compiled, or an argument has another type.
        ValueError: an argument is out of range, or nothing fits the budget; the message says the least that would.
        TimeoutError: a minute found neither a plan nor that there is none.

    References:
        Jain et al. 2020 (Checkmate); Liu et al. 2022 (GACT); Korthikanti et al. 2022.
    Example:
        >>> import torch
        >>> from tq.train.planned import plan_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sigmoid(), torch.nn.Linear(64, 64))
        >>> plan = plan_activations(model, torch.ones(256, 64), 1.0, progress=False)
        >>> plan.bytes_before == plan.bytes_after == 256 * 64 * 4
        True
    """
    priced = priced_trace(
        model, batch, loss=loss, bits=bits, offload=offload, codec=codec, min_elements=min_elements, repeats=repeats,
        progress=progress,
    )  # fmt: skip
    return priced.replanned(budget, peak=peak, noise=noise)


def priced_trace(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    bits: Collection[int] = BITS,
    offload: str | os.PathLike[str] | None = None,
    codec: Codec | None = None,
    min_elements: int = MIN_ELEMENTS,
    repeats: int = 3,
    progress: bool = True,
) -> Priced:
    """The trace of ``plan_activations`` alone, from which plans for several budgets can be made."""
    codec = Codec(scale_dtype=torch.bfloat16) if codec is None else codec
    if not isinstance(codec, Codec):
        raise TypeError(f"codec must be a tq.Codec or None, got {type(codec).__name__}")
    if bad := [b for b in bits if isinstance(b, bool) or not isinstance(b, int) or not 1 <= b <= 8]:
        raise ValueError(f"bits must be integers between 1 and 8, got {bad}")
    if not isinstance(min_elements, int) or min_elements < 1:
        raise ValueError(f"min_elements must be an int of at least 1, got {min_elements!r}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if offload is not None and str(offload) == HOST and device.type == "cpu":
        raise ValueError('offload="host" is for values of a GPU; on a CPU give a folder on a disk')
    trace = trace_step(model, batch, loss, repeats=repeats, progress=progress)
    folder = None if offload is None else str(offload)
    prices = Prices(codec, tuple(sorted(set(bits))), min_elements, folder, device, repeats)
    values = tuple(
        value._replace(ways=prices.ways(value.nbytes, kind) if value.ways else ())
        for value, kind in zip(trace.graph.values, trace.kinds, strict=True)
    )
    graph = Graph(values, trace.graph.operations, trace.graph.asks)
    priced = Priced(dataclasses.replace(trace, graph=graph), codec, folder)
    return _calibrated(priced, lambda: (loss or default_loss)(run_model(model, batch)), model, repeats)


def _calibrated(priced: Priced, forward: Callable[[], Tensor], model: nn.Module, repeats: int) -> Priced:
    """Adds what timing operations alone does not show: following any plan, and running one operation again.

    Steps that keep all, that follow a plan which keeps all, and that follow one which computes much again take turns.
    """
    values = priced.trace.graph.values
    whole = priced.stored({n: KEEP for n, value in enumerate(values) if value.ways and value.asked})
    exact = dataclasses.replace(priced, trace=dataclasses.replace(priced.trace, graph=_kept_only(priced.trace.graph)))
    plans = [whole]
    for share in (0.3, 0.6):
        try:
            plans.append(priced.stored({n: KEEP for n in exact.replanned(share, gap=0.01).choice.stored}))
            break
        except ValueError:
            continue
    parameters = [p for p in model.parameters() if p.requires_grad]
    taken: list[list[float]] = [[] for _ in range(len(plans) + 1)]
    with torch.random.fork_rng():
        for _ in range(repeats):
            for samples, plan in zip(taken, [None, *plans], strict=True):
                start = now()
                with PlannedActivations(plan) if plan else nullcontext():
                    total = forward()
                torch.autograd.grad(total, parameters, allow_unused=True)
                samples.append(now() - start)
                del total
    plain, kept, again = (*map(median, taken), 0.0)[:3]
    trace = dataclasses.replace(priced.trace, watched_s=max(0.0, kept - plain))
    if len(plans) > 1 and (runs := len(plans[1].choice.again)):
        beyond = (again - kept - plans[1].choice.seconds) / runs
        each = min(max(0.0, beyond), _MOST_AGAIN_S)
        operations = tuple(o._replace(seconds=None if o.seconds is None else o.seconds + each)
                           for o in trace.graph.operations)  # fmt: skip
        trace = dataclasses.replace(trace, graph=dataclasses.replace(trace.graph, operations=operations))
    return dataclasses.replace(priced, trace=trace)


def _kept_only(graph: Graph) -> Graph:
    values = tuple(v._replace(ways=tuple(w for w in v.ways if w.name == KEEP)) for v in graph.values)
    return dataclasses.replace(graph, values=values)


@dataclass(frozen=True)
class Priced:
    """A traced step with all ways to store each value."""

    trace: Trace
    codec: Codec
    offload: str | None

    def plan(self, choice: Choice) -> Plan:
        """A plan of one's own choice."""
        return Plan(self.trace, choice, self.codec, self.offload)

    def stored(self, ways: Mapping[int, str]) -> Plan:
        """The plan that stores these values by the names of their ways, and computes again what else is needed.

        ValueError where a value is needed that can be had in no way.
        """
        values = self.trace.graph.values
        places = {v: [way.name for way in values[v].ways].index(name) for v, name in ways.items()}
        choice = settle(self.trace.graph, places)
        if choice is None:
            raise ValueError("a value that backward needs is neither stored nor can it be computed again as it was")
        return self.plan(choice)

    def replanned(
        self, budget: int | float, *, peak: int | None = None, noise: float | None = None, gap: float = GAP
    ) -> Plan:
        """The plan for another budget, as ``plan_activations`` makes it."""
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise TypeError(f"budget must be a number of bytes or a share of them, got {budget!r}")
        if isinstance(budget, float) and not 0 <= budget <= 1:
            raise ValueError(f"budget must be an int of bytes, or a float between 0 and 1, got {budget!r}")
        graph, ties = self.trace.graph, self.trace.ties
        limit = budget if isinstance(budget, int) else int(budget * graph.nbytes)
        free = self.plan(cheapest(graph, limit, noise=noise, ties=ties, gap=gap))
        if peak is None or free.peak_bytes <= peak:
            return free
        least = free.peak_bytes
        for share, loose in _TRIES:
            choice = _cheapest(graph, share * limit, peak=loose * peak, noise=noise, ties=ties, gap=gap)
            if choice is None:
                continue
            plan = self.plan(choice)
            if plan.peak_bytes <= peak:
                return plan
            least = min(least, plan.peak_bytes)
        raise ValueError(
            f"no plan was found that stays within {limit:,} stored bytes and a peak of {peak:,}; "
            f"the lowest that was found is {least:,}"
        )


def _cheapest(graph: Graph, limit: float, **options: Any) -> Choice | None:
    try:
        return cheapest(graph, limit, **options)
    except (ValueError, TimeoutError):
        return None


def compress_activations(*args: Any, plan: Plan | None = None, **options: Any) -> Any:
    """``tq.train.activations.compress_activations``, or the context that follows a plan.

    Args:
        args, options: without a plan, as there.
        plan: of ``plan_activations``; then only ``step`` may be given, the number of the first forward pass.

    Returns:
        A context. With a plan, ``with`` gives its ``Usage``, and the loss must be computed inside.

    Raises:
        TypeError: a plan and other arguments, or what is no plan.

    Example:
        >>> import torch
        >>> from tq.train.planned import compress_activations
        >>> with compress_activations(bits=4) as report:
        ...     y = torch.nn.Linear(64, 64)(torch.ones(256, 64, requires_grad=True))
        >>> report.bytes_before
        0
    """
    if plan is None:
        return _compress(*args, **options)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be what plan_activations returns, got {type(plan).__name__}")
    if args or set(options) - {"step"}:
        raise TypeError("with a plan no other arguments are taken but step: the plan says what is coded")
    return PlannedActivations(plan, **options)

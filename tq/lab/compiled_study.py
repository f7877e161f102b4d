"""Plans of compiled steps beside PyTorch's own knapsack and the methods of eager mode, in turns of one process.

The knapsack's budget is a share of what a compiled step saves, which is less than eager mode keeps. So it stands here
at the shares that its users set, and at the largest that save no more than a plan may; and there a second time with
the planner's timings in the place of its FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from scipy.stats import binom
from torch import Tensor

from tq.lab.recompute_study import (
    BUDGETS,
    COMPILED,
    KEEP,
    KNAPSACK,
    _compiled_step,
    _kept,
    _said,
    _step,
    _turns,
    batch_of,
    eager_methods,
)
from tq.train.model import GPT, GPTConfig
from tq.train.planned._torch_partition import plain_backend, without_modes
from tq.train.planned.joint import Clock, Joint, memory_of
from tq.train.planned.partition import PlannedBackend
from tq.train.planned.plan import Plan, Priced

PLANNED = "planned, compiled"  # and " 50%" and so on
EXACT = "planned, compiled, without 4 bits"
MIN_CUT = "torch min-cut"  # before any budget: results that a code generator would fuse are computed again
SAME_BYTES = "torch knapsack, same bytes"
TIMED = "torch knapsack, same bytes, timed"  # by the planner's clock instead of FLOPs
CODED_KNAPSACK = "torch knapsack in 4 bits"
CODED = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2)  # its shares
Compiled = tuple[GPT, Callable[[], Tensor], Plan | None]


class CodedKnapsack(PlannedBackend):
    """PyTorch's knapsack at a share of its own, and then all that it stores and that may be coded in 4 bits: a single
    rule for all tensors, in the graph in which plans choose for each. What backward must have as it was is kept."""

    def __init__(self, share: float, clock: Clock) -> None:
        super().__init__(1.0, bits=(4,), clock=clock)
        self.share = share

    def _chosen(self, joint: torch.fx.GraphModule, read: Joint, priced: Priced, outputs: int) -> Plan:
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        with config.patch(activation_memory_budget=self.share):
            _, backward = min_cut_rematerialization_partition(deepcopy(joint), None, num_fwd_outputs=outputs)
        names = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        kept = {memory_of(node) for node in joint.graph.nodes if node.name in names}
        values = priced.trace.graph.values
        stored = {n: values[n].ways[-1].name for n, node in enumerate(read.nodes) if node in kept}
        return priced.stored(stored | {n: value.ways[0].name for n, value in enumerate(values) if value.strict})


@dataclass
class Compiler:
    """Compiles the same model again and again, without code generation; clock: of all plans."""

    shape: GPTConfig
    ids: Tensor
    clock: Clock

    def keeping_all(self) -> Compiled:
        """What autograd would keep is kept."""
        from torch._functorch.partitioners import default_partition

        return *self._run(plain_backend(default_partition)), None

    def knapsack(self, share: float, *, timed: bool = False) -> Compiled:
        """Cut by PyTorch's min-cut partitioner, at a share of what it saves without a budget. timed: its costs are
        those of the clock."""
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        options: dict[str, Any] = {"activation_memory_budget": share}
        if timed:
            options["activation_memory_budget_runtime_estimator"] = estimator(self.clock)
        with config.patch(options):
            return *self._run(plain_backend(min_cut_rematerialization_partition)), None

    def knapsack_within(self, nbytes: int, whole: int, tries: int, *, timed: bool = False) -> Compiled:
        """The same at that share which saves the most but no more than these bytes: of a share as large as theirs of
        the ``whole`` without a budget, and of so many more that bisection tries."""
        low, high, share = 0.0, 1.0, min(1.0, nbytes / whole)
        best = self.knapsack(0.0, timed=timed)
        for _ in range(tries + 1):
            found = self.knapsack(share, timed=timed)
            if self.saved(found) <= nbytes:
                low, best = share, max(best, found, key=self.saved)
            else:
                high = share
            share = (low + high) / 2
        return best

    def coded_knapsack(self, share: float) -> Compiled:
        """The knapsack's choice at a share, in 4 bits. Its plan is none of ours."""
        return *self._run(CodedKnapsack(share, self.clock)), None

    def plan(self, nbytes: int, bits: tuple[int, ...]) -> Compiled:
        """By the plan that stores no more than these bytes."""
        backend = PlannedBackend(nbytes, bits=bits, clock=self.clock)
        return *self._run(backend), backend.plans[0]

    def _run(self, backend: Any) -> tuple[GPT, Callable[[], Tensor]]:
        """A model of its own, and its forward pass, compiled and run once."""
        model, ids = GPT(self.shape, seed=0), self.ids
        run = torch.compile(model, backend=backend)
        run(ids, ids)[1].backward()
        return model, lambda: run(ids, ids)[1]

    def saved(self, found: Compiled) -> int:
        """Bytes that the step saves for backward, codes among them; parameters and tokens are not."""
        return saved(found[0], found[1], self.ids)


def estimator(clock: Clock) -> Any:
    """Seconds of a node for PyTorch's knapsack."""
    from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

    class Timed(CustomRuntimeEstimator):
        def __call__(self, node: torch.fx.Node) -> float:
            with without_modes():
                return clock(node) or 0.0

        def uuid(self) -> None:
            return None

    return Timed()


def saved(model: GPT, forward: Callable[[], Tensor], ids: Tensor) -> int:
    """Bytes that a compiled graph saves for backward, codes among them; parameters and tokens are not."""
    held = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), ids)}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        step = x.dtype == torch.int64 and x.dim() == 0  # its number, by which codes were rotated
        if not step and x.untyped_storage()._cdata not in held:
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = forward()
    del loss
    return sum(found.values())


def measured(
    shape: GPTConfig,
    sequences: int,
    *,
    budgets: tuple[float, ...] = BUDGETS,
    knapsack: tuple[float, ...] = KNAPSACK,
    tries: int = 6,
    repeats: int = 9,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Every method of one run on one thread, as ``tq.lab.recompute_study.measured``, with the same rows for each.

    budgets: shares of what keeping all keeps in eager mode; knapsack: its shares as users set them; tries: of further
    shares that give it the bytes of a budget, each of which compiles the model twice.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ids = batch_of(shape, sequences, seed)
        return _measured(GPT(shape, seed=0), ids, (budgets, knapsack, tries), (repeats, seed, progress))
    finally:
        torch.set_num_threads(threads)


def _measured(
    model: GPT, ids: Tensor, shares: tuple[tuple[float, ...], tuple[float, ...], int], how: tuple[int, int, bool]
) -> dict[str, Any]:
    (budgets, knapsack, tries), (repeats, seed, progress) = shares, how
    eager = {name: context for name, (context, _) in eager_methods(model, {}, ()).items()}
    rows: dict[str, Any] = {
        name: {"kept": _kept(model, ids, context, None), "base": KEEP, **_said(None)} for name, context in eager.items()
    }
    limits = {b: int(b * rows[KEEP]["kept"]) for b in budgets}
    compiled = _compiled(Compiler(model.config, ids, Clock(5, progress)), limits, knapsack, tries)
    for name, (other, forward, plan) in compiled.items():
        rows[name] = {"kept": saved(other, forward, ids), "base": COMPILED, **_said(plan)}
        rows[name] |= {"noise": None if plan is None else plan.choice.noise, "gradients": _gradients(other, forward)}
    exact = rows[COMPILED]["gradients"]
    for name in compiled:
        found = rows[name].pop("gradients")
        rows[name]["equal"] = all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
        rows[name]["error"] = _error(found, exact)
    calls: dict[str, Callable[[], None]] = {
        **{name: partial(_step, model, ids, context) for name, context in eager.items()},
        **{name: partial(_compiled_step, other, forward) for name, (other, forward, _) in compiled.items()},
    }
    seconds = _turns(calls, repeats, seed, progress)
    for name, row in rows.items():
        row["seconds"] = seconds[name]
        row["ratios"] = [a / b for a, b in zip(seconds[name], seconds[row["base"]], strict=True)]
    return {"rows": rows, "repeats": repeats, "tokens": ids.numel(), "parameters": model.num_parameters}


def _compiled(
    compiler: Compiler, limits: Mapping[float, int], knapsack: tuple[float, ...], tries: int
) -> dict[str, Compiled]:
    from torch._dynamo import config as dynamo

    torch._dynamo.reset()  # not again: all but the last would be compiled anew, at no budget, when they are called
    with dynamo.patch(recompile_limit=8 + len(CODED) + len(knapsack) + (2 * tries + 8) * len(limits)):
        found = {COMPILED: compiler.keeping_all(), MIN_CUT: compiler.knapsack(1.0)}
        whole = compiler.saved(found[MIN_CUT])
        for share in knapsack:
            found[f"torch knapsack {share:.0%}"] = compiler.knapsack(share)
        for share in CODED:
            found[f"{CODED_KNAPSACK} {share:.0%}"] = compiler.coded_knapsack(share)
        for share, limit in limits.items():
            found[f"{SAME_BYTES} {share:.0%}"] = compiler.knapsack_within(limit, whole, tries)
            found[f"{TIMED} {share:.0%}"] = compiler.knapsack_within(limit, whole, tries, timed=True)
            found[f"{PLANNED} {share:.0%}"] = compiler.plan(limit, (4,))
            found[f"{EXACT} {share:.0%}"] = compiler.plan(limit, ())
    compiler.clock.bar.close()
    return found


def _gradients(model: GPT, forward: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    forward().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def side_by_side(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``measured`` by a task: "shape" (fields of ``GPTConfig``), "sequences", "budgets", "knapsack", "tries",
    "repeats", "seed"."""
    return measured(
        GPTConfig(**task["shape"]), task["sequences"], budgets=tuple(task["budgets"]),
        knapsack=tuple(task["knapsack"]), tries=task["tries"], repeats=task["repeats"], seed=task["seed"],
    )  # fmt: skip


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Relative error of all gradients together, by their norm."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    return float((wrong / sum(float(b.square().sum()) for b in exact)) ** 0.5)


def pooled(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of several processes as one: turns after turns; of bytes, peaks and errors the largest."""
    found = {}
    for name, row in runs[0].items():
        each = [run[name] for run in runs]
        found[name] = row | {key: [x for one in each for x in one[key]] for key in ("seconds", "ratios")}
        found[name] |= {key: max(one[key] for one in each) for key in _LARGEST if row.get(key) is not None}
        found[name]["as planned"] = all(one["planned"] in (None, one["kept"]) for one in each)
        found[name]["off"] = [one["predicted"] - median(one["ratios"]) for one in each if one["predicted"]]
        found[name]["exact"] = all(one.get("equal", "4 bits" not in name) for one in each)
    return found


_LARGEST = ("kept", "planned", "peak", "noise", "error")


def in_seconds(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The same rows, each over that step of those that keep all which is the faster one in the median."""
    base = min((KEEP, COMPILED), key=lambda name: median(rows[name]["seconds"]))
    return {
        name: row | {"ratios": [a / b for a, b in zip(row["seconds"], rows[base]["seconds"], strict=True)]}
        for name, row in rows.items()
    }


def gain(rows: Mapping[str, Any], best: str, ours: str) -> tuple[float, float, float]:
    """Points of overhead by which ours is ahead: the median of the differences turn by turn, and its 95 % interval (of
    order statistics, so that it assumes no distribution)."""
    ratios = [rows[name]["ratios"] for name in (best, ours)]
    apart = sorted(100 * (a - b) for a, b in zip(*ratios, strict=True))
    edge = max(0, int(binom.ppf(0.025, len(apart), 0.5)) - 1)
    return median(apart), apart[edge], apart[-1 - edge]

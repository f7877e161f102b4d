"""Plans of compiled steps beside PyTorch's own knapsack and the methods of eager mode, in turns of one process.

The knapsack's budget is a share of what a compiled step saves, which is less than eager mode keeps. So it stands here
twice: at the shares that its users set, and at those which give it all the bytes of a plan's budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    _as_it_is,
    _compiled_step,
    _kept,
    _said,
    _step,
    _turns,
    batch_of,
    eager_methods,
)
from tq.train.model import GPT, GPTConfig
from tq.train.planned.partition import PlannedBackend
from tq.train.planned.plan import Plan

PLANNED = "planned, compiled"  # and " 50%" and so on
EXACT = "planned, compiled, without 4 bits"
SAME_BYTES = "torch knapsack, same bytes"
Compiled = tuple[GPT, Callable[[], Tensor], Plan | None]


def knapsacks(shape: GPTConfig, ids: Tensor, shares: Mapping[str, float]) -> dict[str, Compiled]:
    """{name: a step that PyTorch's min-cut partitioner cut at this share of what a compiled step saves}."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: dict[str, Compiled] = {}
    for name, share in shares.items():
        backend = aot_autograd(
            fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=min_cut_rematerialization_partition
        )
        with config.patch(activation_memory_budget=share):
            found[name] = *_compiled(shape, ids, backend), None
    return found


def plans(shape: GPTConfig, ids: Tensor, nbytes: Mapping[str, int], bits: tuple[int, ...]) -> dict[str, Compiled]:
    """{name: a step by the plan that stores no more than these bytes}."""
    found: dict[str, Compiled] = {}
    for name, limit in nbytes.items():
        backend = PlannedBackend(limit, bits=bits, progress=False)
        found[name] = *_compiled(shape, ids, backend), backend.plans[0]
    return found


def _compiled(shape: GPTConfig, ids: Tensor, backend: Any) -> tuple[GPT, Callable[[], Tensor]]:
    """A model of its own, and its forward pass, compiled and run once."""
    model = GPT(shape, seed=0)
    run = torch.compile(model, backend=backend)
    run(ids, ids)[1].backward()
    return model, lambda: run(ids, ids)[1]


def saved(model: GPT, forward: Callable[[], Tensor]) -> int:
    """Bytes that a compiled graph saves for backward, codes among them; parameters and tokens are not."""
    held = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.dtype != torch.int64 and x.untyped_storage()._cdata not in held:
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
    repeats: int = 9,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Every method of one run on one thread, as ``tq.lab.recompute_study.measured``, with the same rows for each.

    Budgets are shares of what keeping all keeps in eager mode.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(shape, batch_of(shape, sequences, seed), (budgets, knapsack), repeats, seed, progress)
    finally:
        torch.set_num_threads(threads)


def _measured(
    shape: GPTConfig, ids: Tensor, shares: tuple[tuple[float, ...], tuple[float, ...]], repeats: int, seed: int,
    progress: bool,
) -> dict[str, Any]:  # fmt: skip
    from torch._dynamo import config as dynamo

    model, (budgets, knapsack) = GPT(shape, seed=0), shares
    eager = {name: context for name, (context, _) in eager_methods(model, {}, ()).items()}
    kept = {name: _kept(model, ids, context, None) for name, context in eager.items()}
    limits = {b: int(b * kept[KEEP]) for b in budgets}
    torch._dynamo.reset()  # not again: all but the last would be compiled anew, at no budget, when they are called
    with dynamo.patch(recompile_limit=4 + len(knapsack) + 3 * len(budgets)):
        compiled = knapsacks(shape, ids, {COMPILED: 1.0})
        whole = saved(*compiled[COMPILED][:2])
        compiled |= knapsacks(shape, ids, {f"torch knapsack {b:.0%}": b for b in knapsack})
        same = {f"{SAME_BYTES} {b:.0%}": limit / whole for b, limit in limits.items() if limit < whole}
        compiled |= knapsacks(shape, ids, same)
        for start, bits in ((PLANNED, (4,)), (EXACT, ())):
            compiled |= plans(shape, ids, {f"{start} {b:.0%}": limit for b, limit in limits.items()}, bits)
    rows: dict[str, Any] = {name: {"kept": nbytes, "base": KEEP, **_said(None)} for name, nbytes in kept.items()}
    for name, (other, forward, plan) in compiled.items():
        rows[name] = {"kept": saved(other, forward), "base": COMPILED, **_said(plan)}
    calls: dict[str, Callable[[], None]] = {
        **{name: partial(_step, model, ids, context) for name, context in eager.items()},
        **{name: partial(_compiled_step, other, forward) for name, (other, forward, _) in compiled.items()},
    }
    seconds = _turns(calls, repeats, seed, progress)
    for name, row in rows.items():
        row["seconds"] = seconds[name]
        row["ratios"] = [a / b for a, b in zip(seconds[name], seconds[row["base"]], strict=True)]
    return {"rows": rows, "repeats": repeats, "tokens": ids.numel(), "parameters": model.num_parameters}


def side_by_side(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``measured`` by a task: "shape" (fields of ``GPTConfig``), "sequences", "budgets", "knapsack", "repeats",
    "seed"."""
    return measured(
        GPTConfig(**task["shape"]), task["sequences"], budgets=tuple(task["budgets"]),
        knapsack=tuple(task["knapsack"]), repeats=task["repeats"], seed=task["seed"],
    )  # fmt: skip


def gain(rows: Mapping[str, Any], best: str, ours: str) -> tuple[float, float, float]:
    """Points of overhead by which ours is ahead: difference of medians, and the 95 % interval of the median of the
    differences turn by turn (of order statistics, so that it assumes no distribution)."""
    ratios = [rows[name]["ratios"] for name in (best, ours)]
    apart = sorted(100 * (a - b) for a, b in zip(*ratios, strict=True))
    edge = int(binom.ppf(0.025, len(apart), 0.5))
    theirs, mine = (median(each) for each in ratios)
    return 100 * (theirs - mine), apart[edge], apart[-1 - edge]

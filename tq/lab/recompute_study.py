"""Memory and time of one training step, method beside method: what is kept for backward, and what that costs.

Methods take turns in one process. What eager methods keep is counted over storages alive after the forward pass, what
compiled ones keep over what their graph saves. ``fits`` asks in a fresh process what batch fits under RLIMIT_DATA."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from tqdm import tqdm

from tq.lab.training_step import FOUR, blocks_again
from tq.train.activations import EXACT, RECOMPUTE, compress_activations
from tq.train.model import GPT, GPTConfig, TrainConfig, Trainer
from tq.train.model.corpus import load
from tq.train.planned.plan import Plan, Priced, priced_trace
from tq.train.planned.plan import compress_activations as planned
from tq.train.recompute import PRODUCTS

KEEP, COMPILED = "keep all", "compiled, keep all"
BUDGETS = (0.5, 0.3, 0.2, 0.1, 0.05)  # of what keeping all keeps
KNAPSACK = (0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
_MIB = 1 << 20
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def batch_of(shape: GPTConfig, sequences: int, seed: int = 0) -> Tensor:
    """int64 tokens [sequences, shape.seq]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocab, (sequences, shape.seq), generator=generator)


class _Alive(TorchDispatchMode):
    """Remembers every storage that comes by."""

    def __init__(self, held: set[int]) -> None:
        super().__init__()
        self.held, self.seen = held, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in self.held:
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def nbytes(self) -> int:
        return sum(nbytes for reference, nbytes in self.seen.values() if not reference.expired())


def kept_bytes(model: GPT, forward: Callable[[], Tensor]) -> int:
    """Bytes alive after a forward pass that were not before, without the loss."""
    held = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    with _Alive(held) as alive:
        loss = forward()
    gc.collect()
    return alive.nbytes() - loss.nbytes


def saved_bytes(model: GPT, forward: Callable[[], Tensor]) -> int:
    """Bytes that a compiled graph saves for backward; parameters and inputs are not among them."""
    held = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage()._cdata not in held:
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = forward()
    del loss
    return sum(found.values())


@contextmanager
def segments_again(model: GPT, length: int) -> Iterator[None]:
    """Segments of ``length`` blocks are run again in backward; only their inputs are kept."""
    blocks: list[Any] = list(model.blocks)
    groups = [blocks[k : k + length] for k in range(0, len(blocks), length)]

    def run(group: list[Any], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in group:
            x = type(block).forward(block, x, cos, sin)
        return x

    try:
        for group in groups:
            group[0].forward = partial(checkpoint, partial(run, group), use_reentrant=False)
            for block in group[1:]:
                block.forward = lambda x, cos, sin: x
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _selective(attention: bool) -> Callable[[], Any]:
    saved = [op for op in PRODUCTS if attention or "scaled_dot_product" not in str(op)]
    return partial(create_selective_checkpoint_contexts, saved)


def _always(context: Any) -> Callable[[], Any]:
    return lambda: context


def eager_methods(model: GPT, priced: Mapping[str, Priced], budgets: tuple[float, ...]) -> dict[str, Any]:
    """{method: (what makes its context, plan or None)}; plans carry what they predict."""
    length = max(1, round(len(model.blocks) ** 0.5))
    found: dict[str, Any] = {
        KEEP: (nullcontext, None),
        "checkpoint of every block": (lambda: blocks_again(model), None),
        "checkpoint of √L segments": (lambda: segments_again(model, length), None),
        "selective: products kept": (lambda: blocks_again(model, context_fn=_selective(False)), None),
        "selective: products and attention kept": (lambda: blocks_again(model, context_fn=_selective(True)), None),
        "uniform 4 bits": (_always(compress_activations(bits=FOUR)), None),
        "4 bits, cheap results again": (_always(compress_activations(bits=FOUR, recompute=RECOMPUTE)), None),
        "cheap results again": (_always(compress_activations(bits=EXACT, recompute=RECOMPUTE)), None),
    }
    for name, each in priced.items():
        for budget in budgets:
            try:
                plan = each.replanned(budget)
            except ValueError:
                continue  # below the least possible
            found[f"{name} {budget:.0%}"] = (_always(planned(plan=plan)), plan)
    return found


def _as_it_is(graph: Any, _: Any) -> Any:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    return make_boxed_func(graph.forward)


def compiled_forwards(shape: GPTConfig, ids: Tensor, budgets: tuple[float, ...]) -> dict[str, Any]:
    """{method: (model, forward pass)} of torch's min-cut partitioner with its knapsack, without code generation."""
    # Graphs stay: after a reset all but the last would be compiled anew, at no budget, when they are called.
    from torch._dynamo import config as dynamo
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: dict[str, Any] = {}
    torch._dynamo.reset()
    for budget in (1.0, *budgets):
        model = GPT(shape, seed=0)
        backend = aot_autograd(
            fw_compiler=_as_it_is, bw_compiler=_as_it_is,
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip
        with config.patch(activation_memory_budget=budget), dynamo.patch(recompile_limit=2 + len(budgets)):
            run = torch.compile(model, backend=backend)
            loss = run(ids, ids)[1]
            loss.backward()
        name = COMPILED if budget == 1.0 else f"torch knapsack {budget:.0%}"
        found[name] = (model, lambda run=run: run(ids, ids)[1])
    return found


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
    """Every method of one run.

    Returns {"rows": {method: {"kept": bytes, "seconds": [each turn], "ratios": to keeping all in the same mode and
    turn, "predicted": seconds over those of keeping all or None, "planned": bytes or None, "peak": ..., "ways": ...}}}.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(shape, sequences, budgets, knapsack, (repeats, seed, progress))
    finally:
        torch.set_num_threads(threads)


def _measured(
    shape: GPTConfig, sequences: int, budgets: tuple[float, ...], knapsack: tuple[float, ...],
    how: tuple[int, int, bool],
) -> dict[str, Any]:
    repeats, seed, progress = how
    model, ids = GPT(shape, seed=0), batch_of(shape, sequences, seed)
    priced = {
        "planned": priced_trace(model, (ids, ids), progress=progress, repeats=5),
        "planned without codes": priced_trace(model, (ids, ids), bits=(), progress=progress, repeats=5),
    }
    methods = eager_methods(model, priced, budgets)
    compiled = compiled_forwards(shape, ids, knapsack) if knapsack else {}
    rows: dict[str, Any] = {}
    for name, (context, plan) in methods.items():
        kept = _kept(model, ids, context, plan)
        rows[name] = {"kept": kept, "base": KEEP, **_said(plan)}
    for name, (other, forward) in compiled.items():
        rows[name] = {"kept": saved_bytes(other, forward), "base": COMPILED, **_said(None)}
    calls: dict[str, Callable[[], None]] = {
        **{name: partial(_step, model, ids, context) for name, (context, _) in methods.items()},
        **{name: partial(_compiled_step, other, forward) for name, (other, forward) in compiled.items()},
    }
    seconds = _turns(calls, repeats, seed, progress)
    for name, row in rows.items():
        row["seconds"] = seconds[name]
        row["ratios"] = [a / b for a, b in zip(seconds[name], seconds[row["base"]], strict=True)]
    return {"rows": rows, "repeats": repeats, "tokens": ids.numel(), "parameters": model.num_parameters}


def _said(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {"predicted": None, "planned": None, "peak": None, "ways": None}
    return {
        "predicted": 1 + plan.overhead, "planned": plan.bytes_after, "peak": plan.peak_bytes,
        "ways": plan.bytes_by_way,
    }  # fmt: skip


def _kept(model: GPT, ids: Tensor, context: Any, plan: Plan | None) -> int:
    """Counted for a plan by the step itself, which can be compared with the plan; for others over what is alive."""
    def forward() -> Tensor:
        with context():
            return _loss(model, ids)

    if plan is None:
        forward().backward()
        return kept_bytes(model, forward)
    with context() as usage:
        _loss(model, ids)
    return int(usage.stored)


def _loss(model: Callable[..., Any], ids: Tensor) -> Tensor:
    loss: Tensor = model(ids, ids)[1]
    return loss


def _step(model: GPT, ids: Tensor, context: Callable[[], AbstractContextManager[Any]]) -> None:
    model.zero_grad()
    with context():
        loss = _loss(model, ids)
    loss.backward()


def _compiled_step(model: GPT, forward: Callable[[], Tensor]) -> None:
    model.zero_grad()
    forward().backward()


def _turns(
    calls: Mapping[str, Callable[[], None]], repeats: int, seed: int, progress: bool
) -> dict[str, list[float]]:
    """Seconds of this thread's processor, method beside method, in another order each turn; the first warms up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    orders = random.Random(seed)
    gc.freeze()  # what stands before the turns is looked at by no collection between them
    try:
        for turn in tqdm(range(repeats + 1), unit="turn", disable=not progress, dynamic_ncols=True):
            for name in orders.sample([*calls], len(calls)):
                gc.collect()
                start = time.process_time()
                calls[name]()
                if turn:
                    taken[name].append(time.process_time() - start)
    finally:
        gc.unfreeze()
    return taken


def side_by_side(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``measured`` by a task: "shape" (fields of ``GPTConfig``), "sequences", "knapsack", "repeats", "seed"."""
    return measured(
        GPTConfig(**task["shape"]), task["sequences"], knapsack=tuple(task["knapsack"]), repeats=task["repeats"],
        seed=task["seed"],
    )  # fmt: skip


def best_single(rows: Mapping[str, Any], budget: float) -> str | None:
    """The method with the lowest median overhead, plans apart, that keeps no more than a share of what keeping all
    keeps in eager mode; None where no method does."""
    whole = rows[KEEP]["kept"]
    fitting = [n for n, r in rows.items() if r["planned"] is None and r["kept"] <= budget * whole]
    return min(fitting, key=lambda name: sorted(rows[name]["ratios"])[len(rows[name]["ratios"]) // 2], default=None)


# --- the largest batch under a ceiling ------------------------------------------------------------------------


def largest_batch(
    shape: Mapping[str, Any], method: str, ceiling_bytes: int, *, most: int = 4096, share: float = 0.08, steps: int = 3
) -> dict[str, Any]:
    """The largest number of sequences whose step fits under RLIMIT_DATA, each tried in a fresh process.

    Args:
        shape: fields of ``GPTConfig``.
        method: "keep all", "checkpoint of every block", "uniform 4 bits" or "planned".
        ceiling_bytes: data that the step may add to what the process has when its model stands.
        most: where the search ends.
        share: of what keeping all keeps, that a plan may store; in backward it may hold twice that.
        steps: that are timed at the largest.

    Returns {"batch": sequences, 0 if not even one fits; "seconds_per_token": of the median step; "tries": how many}.
    """
    low, high, tries, found = 0, 1, 0, None
    while high <= most and (answer := fits(shape, method, high, ceiling_bytes, share, steps))["fits"]:
        low, high, found, tries = high, 2 * high, answer, tries + 1
    high = min(high, most + 1)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        answer, tries = fits(shape, method, middle, ceiling_bytes, share, steps), tries + 1
        low, high = (middle, high) if answer["fits"] else (low, middle)
        found = answer if answer["fits"] else found
    per_token = None if found is None else found["seconds"] / (low * shape["seq"])
    return {"batch": low, "seconds_per_token": per_token, "tries": tries}


def ceiling(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``largest_batch`` by a task: "shape", "method", "ceiling" in bytes, "steps"; "round" makes repeats differ."""
    return largest_batch(task["shape"], task["method"], task["ceiling"], steps=task["steps"])


def fits(
    shape: Mapping[str, Any], method: str, sequences: int, ceiling_bytes: int, share: float, steps: int
) -> dict[str, Any]:
    """Whether a step on so many sequences fits, in a fresh process: {"fits": ..., "seconds": of a step or None}."""
    with tempfile.TemporaryDirectory() as folder:
        task = dict(shape=dict(shape), method=method, sequences=sequences, ceiling=ceiling_bytes, steps=steps)
        if method == "planned":
            config = GPTConfig(**shape)
            ids = batch_of(config, sequences)
            priced = priced_trace(GPT(config), (ids, ids), repeats=1, progress=False)
            plan = _lowest_peak(priced, share)
            Path(folder, "plan").write_bytes(pickle.dumps(plan))
            task["plan"] = str(Path(folder, "plan"))
        done = subprocess.run(
            [sys.executable, "-m", "tq.lab.recompute_study", json.dumps(task)],
            capture_output=True, text=True, env={**os.environ, **_ENVIRONMENT}, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the process under a ceiling failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _lowest_peak(priced: Priced, share: float) -> Plan:
    """The plan with the lowest peak of a few that are tried."""
    nbytes = priced.trace.graph.nbytes
    for peak in (1.25, 1.5, 2.0, 2.5, 3.0, 4.0):
        try:
            return priced.replanned(share, peak=int(peak * share * nbytes), gap=0.01)
        except ValueError:
            continue
    return priced.replanned(share, gap=0.01)


def _context(model: GPT, method: str, plan: Plan | None) -> Callable[[], AbstractContextManager[Any]]:
    if plan is not None:
        return _always(planned(plan=plan))
    made = {
        KEEP: nullcontext,
        "checkpoint of every block": lambda: blocks_again(model),
        "uniform 4 bits": _always(compress_activations(bits=FOUR)),
    }
    return made[method]  # type: ignore[return-value]


def under_a_ceiling(task: dict[str, Any]) -> dict[str, Any]:
    """A step in this process under RLIMIT_DATA, which stays: what the fresh process of ``fits`` does."""
    import resource

    torch.set_num_threads(1)
    model = GPT(GPTConfig(**task["shape"]))
    plan = pickle.loads(Path(task["plan"]).read_bytes()) if "plan" in task else None
    ids = batch_of(model.config, task["sequences"])
    warm = ids[:1]
    _step(model, warm, nullcontext if plan is not None else _context(model, task["method"], None))
    with compress_activations(bits=4):
        _loss(model, warm)
    model.zero_grad()
    gc.collect()
    status = Path("/proc/self/status").read_text()
    now = int(status.split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + task["ceiling"],) * 2)
    context, taken = _context(model, task["method"], plan), []
    try:
        for _ in range(task["steps"]):
            start = time.process_time()
            _step(model, ids, context)
            taken.append(time.process_time() - start)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        return {"fits": False, "seconds": None}
    return {"fits": True, "seconds": sorted(taken)[len(taken) // 2]}


# --- whether training by a plan is training -------------------------------------------------------------------


def trained(task: Mapping[str, Any], device: str = "cpu") -> dict[str, float]:
    """Validation loss of a run that follows a plan, or keeps all: {"valid": nats per token, "kept": share of bytes}.

    task: "shape" (of ``GPTConfig``), "steps", "batch", "seed", "share" (None keeps all), "most_text" (bytes)."""
    torch.set_num_threads(1)
    shape = GPTConfig(**task["shape"])
    corpus = load("stdlib", max_bytes=task["most_text"])
    model = GPT(shape, seed=task["seed"])
    run = Trainer(model, corpus, TrainConfig(task["steps"], task["batch"], seed=task["seed"]))
    kept = 1.0
    if task["share"] is not None:
        ids = batch_of(shape, task["batch"])
        plan = priced_trace(model, (ids, ids), repeats=1, progress=False).replanned(task["share"])
        context, plain, kept = planned(plan=plan), run.forward, plan.bytes_after / plan.bytes_before

        def forward(*batch: Any) -> Any:
            with context:
                return plain(*batch)

        run.forward = forward
        run.train(progress=False)
        run.forward = plain
    else:
        run.train(progress=False)
    return {"valid": float(run.evaluate(task.get("evaluated", 20))), "kept": kept}


if __name__ == "__main__":
    print(json.dumps(under_a_ceiling(json.loads(sys.argv[1]))))

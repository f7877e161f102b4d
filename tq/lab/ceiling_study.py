"""The largest batch whose step fits under a hard limit of memory, and what a token then takes, method beside method.

Every try is a fresh process under RLIMIT_DATA. Families of methods are tried in several settings each, so that none is
judged by one that suits it badly: segments of blocks, budgets of PyTorch's knapsack, shares of a plan."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq.lab.recompute_study import KEEP, _always, _loss, _step, batch_of, segments_again
from tq.lab.training_step import FOUR, blocks_again
from tq.train.activations import RECOMPUTE, compress_activations
from tq.train.coded_checkpoints import coded_checkpoints
from tq.train.model import GPT, GPTConfig
from tq.train.planned.peak import lowest_peak
from tq.train.planned.plan import BITS, priced_trace
from tq.train.planned.plan import compress_activations as planned

PLANNED, EXACT_PLAN, CODED_CHECKPOINTS = "planned", "planned without codes", "checkpoints in 4 bits"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    PLANNED: (PLANNED,),
    EXACT_PLAN: (EXACT_PLAN,),
    CODED_CHECKPOINTS: (CODED_CHECKPOINTS,),
    "torch knapsack": ("knapsack 0.5", "knapsack 0.1", "knapsack 0.05"),
    "4 bits": ("uniform 4 bits", "4 bits, cheap results again"),
    "checkpoints": ("segments of 1", "segments of 2", "segments of 3"),
    KEEP: (KEEP,),
}
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def fits(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Whether a step fits, in a fresh process: {"fits": ..., "seconds": of its median step or None}.

    task: "shape" (fields of ``GPTConfig``), "method" (of ``SETTINGS``), "sequences", "ceiling" (bytes that the step may
    add to what the process has when its model stands), "steps"; "round" makes repeats differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = dict(task)
        if task["method"] in (PLANNED, EXACT_PLAN):
            config, bits = GPTConfig(**task["shape"]), BITS if task["method"] == PLANNED else ()
            ids = batch_of(config, task["sequences"])
            plan = lowest_peak(priced_trace(GPT(config), (ids, ids), bits=bits, repeats=1, progress=False))
            Path(folder, "plan").write_bytes(pickle.dumps(plan))
            given["plan"] = str(Path(folder, "plan"))
        done = subprocess.run(
            [sys.executable, "-m", "tq.lab.ceiling_study", json.dumps(given)],
            capture_output=True, text=True, env={**os.environ, **_ENVIRONMENT}, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the process under a ceiling failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def largest_batch(task: Mapping[str, Any], device: str = "cpu") -> dict[str, int]:
    """{"batch": sequences that fit, within one in sixteen; 0 if not even one does; "tries": processes}.

    task: as of ``fits`` but for "sequences" and "steps"; "start": the number that is tried first, 1 by default.
    """
    low, high, tries = 0, task.get("start", 1), 0
    ask = {k: v for k, v in task.items() if k != "start"} | {"steps": 1}
    while fits(ask | {"sequences": high})["fits"]:
        low, high, tries = high, 2 * high, tries + 1
    while high - low > max(1, low // 16):
        middle, tries = (low + high) // 2, tries + 1
        low, high = (middle, high) if fits(ask | {"sequences": middle})["fits"] else (low, middle)
    return {"batch": low, "tries": tries + 1}


def knapsack(model: GPT, budget: float) -> Callable[..., Any]:
    """The model under torch's partitioner at ``activation_memory_budget``, its graphs run node by node.

    A graph frees each tensor after its last use, those that were saved for backward too. What runs again is in the
    order that PyTorch has for recomputed parts; no code is generated.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.partitioners import (
        min_cut_rematerialization_partition,
        reordering_to_mimic_autograd_engine,
    )

    def backward(graph: Any, inputs: Any) -> Any:
        return run(reordering_to_mimic_autograd_engine(graph), inputs)

    def run(graph: Any, _: Any) -> Any:
        def call(arguments: list[Any]) -> Any:
            return torch.fx.Interpreter(graph).boxed_run(arguments)  # a new one each time: it holds what it returned

        call._boxed_call = True  # type: ignore[attr-defined]  # told to PyTorch: the list of arguments may be emptied
        return call

    backend = aot_autograd(fw_compiler=run, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(model, backend=backend)

    def forward(*batch: Tensor) -> Any:
        with config.patch(activation_memory_budget=budget):  # read when a graph is made, at the first call
            return compiled(*batch)

    return forward


def _context(model: GPT, method: str) -> Callable[[], AbstractContextManager[Any]]:
    if method == CODED_CHECKPOINTS:
        return lambda: coded_checkpoints(model.blocks)
    if method.startswith("segments of "):
        length = int(method.rsplit(" ", 1)[1])
        return lambda: blocks_again(model) if length == 1 else segments_again(model, length)
    if method == KEEP or method.startswith("knapsack "):
        return nullcontext
    again: dict[str, Any] = {"uniform 4 bits": {}, "4 bits, cheap results again": {"recompute": RECOMPUTE}}[method]
    return _always(compress_activations(bits=FOUR, **again))


def under_a_ceiling(task: dict[str, Any]) -> dict[str, Any]:
    """Steps in this process under RLIMIT_DATA, which stays: what the fresh process of ``fits`` does."""
    import resource

    torch.set_num_threads(1)
    model = GPT(GPTConfig(**task["shape"]))
    plan = pickle.loads(Path(task["plan"]).read_bytes()) if "plan" in task else None
    ids, method = batch_of(model.config, task["sequences"]), task["method"]
    context = _always(planned(plan=plan)) if plan is not None else _context(model, method)
    called: Any = knapsack(model, float(method.split()[1])) if method.startswith("knapsack ") else model
    if called is not model:
        called(ids, ids)[1].backward()  # graphs are made for one shape, and before the limit counts
    _step(model, ids[:1], nullcontext if plan is not None else context)
    with compress_activations(bits=4):
        _loss(model, ids[:1])
    model.zero_grad()
    gc.collect()
    now = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + task["ceiling"],) * 2)
    taken = []
    try:
        for _ in range(task["steps"]):
            start = time.process_time()
            model.zero_grad()
            with context():
                loss = _loss(called, ids)
            loss.backward()
            taken.append(time.process_time() - start)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        return {"fits": False, "seconds": None}
    return {"fits": True, "seconds": sorted(taken)[len(taken) // 2]}


if __name__ == "__main__":
    print(json.dumps(under_a_ceiling(json.loads(sys.argv[1]))))

"""Losses of runs whose activations follow a plan, beside runs that keep all: a plan for a tenth of the bytes, and the
plan with the lowest peak, which is what a limit of memory asks for; and of checkpoints in 4 bits, which need none.

Runs of one seed start from the same weights and read the same text. A plan is made anew for each run, as a user would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tq.lab.recompute_study import KEEP, batch_of
from tq.train.coded_checkpoints import coded_checkpoints
from tq.train.model import GPT, GPTConfig, TrainConfig, Trainer
from tq.train.model.corpus import load
from tq.train.planned.peak import lowest_peak
from tq.train.planned.plan import Plan, Priced, priced_trace
from tq.train.planned.plan import compress_activations as planned

TENTH, LOWEST, CODED = "a tenth", "lowest peak", "checkpoints in 4 bits"
_PLANS: Mapping[str, Callable[[Priced], Plan]] = {TENTH: lambda priced: priced.replanned(0.1), LOWEST: lowest_peak}
ARMS = (KEEP, *_PLANS, CODED)


def trained(task: Mapping[str, Any], device: str = "cpu") -> dict[str, float | None]:
    """Validation loss of one run: {"valid": nats per token, "kept", "peak": shares of the bytes that autograd keeps, as
    planned; 1 where all is kept, None for checkpoints, which no plan counts}.

    task: "shape" (of ``GPTConfig``), "steps", "batch", "seed", "arm" (of ``ARMS``), "most_text" (bytes), "evaluated"
    (batches of held-out text).
    """
    torch.set_num_threads(1)
    model = GPT(GPTConfig(**task["shape"]), seed=task["seed"])
    corpus = load("stdlib", max_bytes=task["most_text"])
    run = Trainer(model, corpus, TrainConfig(task["steps"], task["batch"], seed=task["seed"]))
    kept: float | None
    peak: float | None
    plain, kept, peak = run.forward, 1.0, 1.0
    context: AbstractContextManager[Any] = nullcontext()
    if task["arm"] == CODED:
        kept, peak, context = None, None, coded_checkpoints(model.blocks)
    elif task["arm"] != KEEP:
        ids = batch_of(model.config, task["batch"])
        plan = _PLANS[task["arm"]](priced_trace(model, (ids, ids), repeats=1, progress=False))
        kept, peak = plan.bytes_after / plan.bytes_before, plan.peak_bytes / plan.bytes_before
        context = planned(plan=plan)

    def followed(*batch: Any) -> Any:
        with context:
            return plain(*batch)

    run.forward = followed
    run.train(progress=False)
    run.forward = plain  # held-out text has batches of other shapes
    return {"valid": float(run.evaluate(task["evaluated"])), "kept": kept, "peak": peak}


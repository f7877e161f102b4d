"""Runs that keep their activations as codes for the backward pass, from a step on; the steps before are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tq.quant.codec import Codec
from tq.train.activations import BITS, EXACT, RECOMPUTE, compress_activations
from tq.train.experiments import paired_runs
from tq.train.experiments.paired_runs import Run

FOUR = dict.fromkeys(BITS, 4)
KEPT: dict[str, dict[str, Any]] = {
    "exact": {"bits": EXACT},
    "4 bits": {"bits": FOUR},
    "mixed": {"bits": BITS},
    "recompute": {"bits": EXACT, "recompute": RECOMPUTE},
    "4 bits, recompute": {"bits": FOUR, "recompute": RECOMPUTE},
    "mixed, recompute": {"bits": BITS, "recompute": RECOMPUTE},
    "2 bits": {"bits": 2},
}  # arguments of ``compress_activations``


@dataclass(frozen=True)
class ActivationRun(Run):
    """kept: what is kept for the backward pass, a name of ``KEPT``; shared: steps before that keep everything exact.

    code_seed: of the signs of the codes. There is one worker.
    """

    workers: int = 1
    kept: str = "exact"
    shared: int = 0


def train(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A whole run, by the fields of ``ActivationRun`` that are not the default.

    Returns losses (float32 [steps done]) and valid in nats a token, valid NaN if the run diverged; kept: bytes that
    the last step kept over those that it would have kept exact.
    """
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in task.items()}
    run = ActivationRun(**given)
    if run.kept not in KEPT:
        raise ValueError(f"kept must be one of {', '.join(KEPT)}, got {run.kept!r}")
    if run.workers != 1 or not 0 <= run.shared < run.steps:
        raise ValueError(f"workers must be 1 and shared in [0, steps), got {run.workers} and {run.shared}")
    trained, valid, share = paired_runs.trainer(run, device), math.nan, 1.0
    seed = run.seed if run.code_seed is None else run.code_seed
    coded = compress_activations(Codec(scale_dtype=torch.bfloat16, seed=seed), **KEPT[run.kept])
    plain = trained.forward

    def forward(*batch: Any) -> Any:
        nonlocal share
        with coded as report:
            found = plain(*batch)
        share = report.bytes_after / report.bytes_before
        return found

    try:
        trained.train(run.shared, progress=False)
        if run.kept != "exact":
            trained.forward = forward
        trained.train(progress=False)
        trained.forward = plain
        valid = trained.evaluate(run.evaluated)
    except FloatingPointError:
        pass
    return {"losses": torch.tensor(trained.losses), "valid": valid, "kept": share}

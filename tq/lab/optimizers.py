"""Optimizers with compressed states, other people's beside ours: what they hold, how a step and a run of each go.

A `make` takes parameters or their groups, and `lr` and more by name, and gives the optimizer. What needs PyTorch's
compiler (torchao's step) runs compiled where it is timed, and as it stands ("eager") where only its numbers count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tq.lab import peers
from tq.train.experiments import shared_start
from tq.train.experiments.paired_runs import Run
from tq.train.model import GPT, PRESETS, Corpus, TrainConfig, Trainer, load, parameter_groups

Make = Callable[..., Optimizer]
PEERS = {
    "bitsandbytes 8-bit": ("bitsandbytes.optim", "AdamW8bit"),
    "torchao 8-bit": ("torchao.optim", "AdamW8bit"),
    "torchao 4-bit": ("torchao.optim", "AdamW4bit"),
    "bitsandbytes Lion": ("bitsandbytes.optim", "Lion"),
}
WARM = 10  # steps of a run that are not timed: compiling, and what grows in the first of them


def installed(device: str) -> tuple[dict[str, Make], dict[str, str]]:
    """({name: make} of `PEERS` that make a step on this device, {name: why not} of the others)."""
    found: dict[str, Make] = {}
    missing: dict[str, str] = {}
    for name, (module, kind) in PEERS.items():
        try:
            make = getattr(import_module(module), kind)
            weight = torch.nn.Parameter(torch.ones(64, 128, device=device))
            weight.grad = torch.ones_like(weight)
            with torch.compiler.set_stance("force_eager"):
                make([weight], lr=1e-3).step()
            found[name] = make
        except ModuleNotFoundError:
            missing[name] = peers.INSTALL
        except Exception as error:  # whatever it is, it is said
            missing[name] = peers.said(error)
    return found, missing


def schedulable(optimizer: Optimizer) -> Optimizer:
    """torchao wants the learning rate as a tensor, schedules set a number: turned into one before each step."""

    def as_tensor(chosen: Optimizer, given: Any, named: Any) -> None:
        for group in chosen.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)

    if type(optimizer).__module__.startswith("torchao"):
        optimizer.register_step_pre_hook(as_tensor)
    return optimizer


def storage(x: Any) -> dict[int, int]:
    """{address: bytes} of all tensors in x, nested dicts looked through, and wrappers down to what they hold."""
    if isinstance(x, Mapping):
        return {at: size for part in x.values() for at, size in storage(part).items()}
    if not isinstance(x, Tensor):
        return {}
    if hasattr(x, "__tensor_flatten__"):
        return storage({name: getattr(x, name) for name in x.__tensor_flatten__()[0]})
    return {x.data_ptr(): x.nbytes}


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes that an optimizer keeps, its small tensors included."""
    ours: int | None = getattr(optimizer, "state_nbytes", None)
    return sum(storage(dict(optimizer.state)).values()) if ours is None else ours


def bytes_per_parameter(make: Make, device: str, preset: str = "1m") -> float:
    """Of the state, after one step of a GPT with a made-up gradient."""
    model = GPT(PRESETS[preset], seed=0).to(device)
    for p in model.parameters():
        p.grad = torch.sin(torch.arange(p.numel(), device=device, dtype=torch.float32)).view_as(p)
    optimizer = make(parameter_groups(model, 0.1))
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    return state_bytes(optimizer) / model.config.num_parameters


def stepping(make: Make, side: int, device: str) -> Callable[[], Any]:
    """`step` of an optimizer over eight square matrices with gradients."""
    weights = [torch.nn.Parameter(torch.randn(side, side, device=device)) for _ in range(8)]
    for w in weights:
        w.grad = torch.randn_like(w)
    return make(weights, lr=1e-3).step


def _trainer(make: Make, preset: str, corpus: Corpus, config: TrainConfig, device: str) -> Trainer:
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}

    def made(groups: list[dict[str, Any]]) -> Optimizer:
        return schedulable(make(groups, **options))

    return Trainer(GPT(PRESETS[preset], config.seed), corpus, config, device, made)


def held_out_loss(make: Make, run: Run, shared: int, corpus: Corpus, device: str) -> float | None:
    """In nats a token, of `run` with another optimizer after `shared` steps of AdamW; None where it diverged."""
    config = TrainConfig(run.steps, run.batch, lr=run.lr, grad_clip=1.0, seed=run.seed)
    trained = shared_start.go_on(_trainer(make, run.preset, corpus, config, device), replace(run), shared)
    try:
        with torch.compiler.set_stance("force_eager"):
            trained.train(progress=False)
    except FloatingPointError:
        return None
    return trained.evaluate(run.evaluated)


def train_peer(task: dict[str, Any], device: str = "cpu") -> dict[str, float]:
    """As ``shared_start.train``, with "peer": a name of ``PEERS``, in the place of our optimizer after the start.

    Returns valid in nats a token, NaN if the run diverged.
    """
    plain = {k: v for k, v in task.items() if k not in ("shared", "peer")}
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    run = Run(**given)
    module, kind = PEERS[task["peer"]]
    make: Make = getattr(import_module(module), kind)
    loss = held_out_loss(make, run, task["shared"], load("stdlib", max_bytes=run.max_bytes), device)
    return {"valid": math.nan if loss is None else loss}


def one_run(make: Make, preset: str, corpus: Corpus, config: TrainConfig, device: str) -> dict[str, float | None]:
    """{"step": seconds, "loss": held-out nats, "peak": GiB on a GPU, else None, "state": bytes a parameter} of a run.

    Compiled where the optimizer compiles itself; the first `WARM` steps, or half of fewer than twice as many, are made
    before the time counts.
    """
    run = _trainer(make, preset, corpus, config, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    warm = min(WARM, config.steps // 2)
    run.train(warm, progress=False)
    _wait(device)
    start = time.perf_counter()
    run.train(progress=False)
    _wait(device)
    step_s = (time.perf_counter() - start) / (config.steps - warm)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    state = state_bytes(run.optimizer) / run.model.config.num_parameters
    return {"step": step_s, "loss": run.evaluate(), "peak": peak, "state": state}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

"""Bytes of states are counted down to storage, peers are timed as they run, and what is not there is named."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch

from tq.lab import optimizers, peers
from tq.train.experiments.paired_runs import Run, fields
from tq.train.model import PRESETS, TrainConfig, load
from tq.train.optim import TurboQuantAdamW


class Wrapper(torch.Tensor):
    """A subclass that holds two tensors, as torchao's states do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (100,))

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        raise AssertionError(f"{function} was called: the wrapper itself holds nothing")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None


def test_storage_looks_into_wrappers_and_counts_shared_memory_once() -> None:
    x = torch.zeros(10)
    wrapped = Wrapper(torch.zeros(50, dtype=torch.uint8), torch.zeros(2))
    assert sum(optimizers.storage({"a": x, "b": {"again": x, "step": 3, "w": wrapped}}).values()) == 40 + 50 + 8


@pytest.mark.parametrize(("make", "width"), [(torch.optim.AdamW, 8.0), (TurboQuantAdamW, None)])
def test_bytes_of_a_state(make: Any, width: float | None) -> None:
    found = optimizers.bytes_per_parameter(make, "cpu", preset="tiny")
    if width is None:
        assert 1 <= found < 20
    else:
        assert found == pytest.approx(width, rel=1e-3)  # and a step counter a tensor


def test_what_is_installed_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lion of bitsandbytes steps, its AdamW8bit raises, torchao is not there."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel\nfor this device")

    fake = types.ModuleType("bitsandbytes.optim")
    monkeypatch.setattr(fake, "Lion", torch.optim.SGD, raising=False)
    monkeypatch.setattr(fake, "AdamW8bit", refuses, raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", fake)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    found, missing = optimizers.installed("cpu")
    assert found == {"bitsandbytes Lion": torch.optim.SGD}
    absent = dict.fromkeys(("torchao 8-bit", "torchao 4-bit"), peers.INSTALL)
    assert missing == {"bitsandbytes 8-bit": "RuntimeError: no kernel"} | absent


class Schedules(torch.optim.SGD):
    """Takes the learning rate as a tensor only, and notes the stance that it was run under."""

    seen: list[str] = []

    def step(self, closure: Any = None) -> Any:
        assert all(isinstance(group["lr"], torch.Tensor) for group in self.param_groups)
        Schedules.seen.append(torch._dynamo.eval_frame._stance.stance)
        for group in self.param_groups:
            group["lr"] = float(group["lr"])
        return super().step(closure)


Schedules.__module__ = "torchao.optim.stand_in"


def stand_in(groups: Any, **options: Any) -> Schedules:
    return Schedules(groups, lr=options["lr"])


def test_a_timed_run_is_not_made_eager_and_leaves_the_first_steps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles its step would otherwise be recorded without its compiler."""
    monkeypatch.setattr(Schedules, "seen", [])
    now = [0.0]

    def tick() -> float:
        return now[0]

    class Slow(Schedules):
        def step(self, closure: Any = None) -> Any:
            now[0] += 100.0 if len(Schedules.seen) < optimizers.WARM else 2.0  # compiles in the first ones
            return super().step(closure)

    Slow.__module__ = Schedules.__module__
    monkeypatch.setattr(optimizers.time, "perf_counter", tick)
    corpus = load("stdlib", max_bytes=200_000)
    config = TrainConfig(2 * optimizers.WARM, 2, seq=16, lr=1e-3)
    made = lambda groups, **options: Slow(groups, lr=options["lr"])  # noqa: E731
    outcome = optimizers.one_run(made, "tiny", corpus, config, "cpu")
    assert outcome["step"] == 2.0 and outcome["peak"] is None and outcome["state"] == 0
    assert set(Schedules.seen) == {"default"} and len(Schedules.seen) == config.steps


def test_a_loss_is_that_of_the_shared_start_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedules, "seen", [])
    run = Run(preset="tiny", steps=4, max_bytes=200_000, workers=1, lr=1e-3)
    corpus = load("stdlib", max_bytes=run.max_bytes)
    loss = optimizers.held_out_loss(stand_in, run, 2, corpus, "cpu")
    assert loss is not None and 0 < loss < 1.2 * torch.log(torch.tensor(PRESETS["tiny"].vocab)).item()
    assert Schedules.seen == ["force_eager"] * 2  # only the steps after the shared ones

    def diverges(groups: Any, **options: Any) -> Any:
        return torch.optim.SGD(groups, lr=1e30, foreach=False)

    def far(groups: Any, **options: Any) -> Any:
        optimizer = diverges(groups)
        optimizer.register_step_pre_hook(lambda chosen, *_: [g.update(lr=1e30) for g in chosen.param_groups] and None)
        return optimizer

    assert optimizers.held_out_loss(far, run, 1, corpus, "cpu") is None


def test_a_peers_task_is_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "PEERS", {"PyTorch's": ("torch.optim", "AdamW")})
    run = Run(preset="tiny", steps=4, max_bytes=200_000, workers=1, lr=1e-3, evaluated=2)
    task = {**fields(run), "shared": 2, "peer": "PyTorch's"}
    found = optimizers.train_peer(task)
    corpus = load("stdlib", max_bytes=run.max_bytes)
    assert found == {"valid": optimizers.held_out_loss(torch.optim.AdamW, run, 2, corpus, "cpu")}
    monkeypatch.setattr(optimizers, "held_out_loss", lambda *_: None)
    assert math.isnan(optimizers.train_peer(task)["valid"])

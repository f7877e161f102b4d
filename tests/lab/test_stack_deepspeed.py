"""DeepSpeed's ZeRO: every stage trains as DDP does, plain and coded, and compiles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.stack_helpers import digests, installed, sums
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.run import here

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 6
STAGES = (pytest.param(0, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.soak), 2, 3)


@pytest.fixture(scope="module")
def deepspeed() -> Stack:
    return installed("deepspeed")


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return here(STACKS["ddp"], steps=STEPS)


def loss(told: list[dict[str, Any]]) -> float:
    return float(told[0]["runs"][0]["valid"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_as_ddp_does_and_is_coded(deepspeed: Stack, alone: list[dict[str, Any]], stage: int) -> None:
    task: dict[str, Any] = {"steps": STEPS, "options": {"stage": stage}}
    plain, coded = here(deepspeed, **task), here(deepspeed, **task, way="backend", warmup=2)
    assert loss(plain) == pytest.approx(loss(alone), abs=1e-4), "it clips gradients unless it is told not to"
    assert stage == 3 or digests(plain) == digests(alone)
    assert len(digests(coded)) == 1 and digests(coded) != digests(plain)
    assert abs(loss(coded) - loss(plain)) < 0.1
    counted = sums(coded, "reduce_scatter" if stage == 3 else "all_reduce")
    # Two of six steps are exact, so 3 times fewer is the most: 6 / (2 + 4 / 7.53).
    assert 2.2 < counted["times"] < 2.5 and counted["coded"] == 4


def test_without_exact_steps_stage_3_sends_a_seventh(deepspeed: Stack) -> None:
    coded = here(deepspeed, steps=3, way="backend", options={"stage": 3})
    assert len(digests(coded)) == 1 and sums(coded, "reduce_scatter")["times"] > 7.4


def test_padding_that_nobody_wrote_is_not_coded(deepspeed: Stack) -> None:
    """Of 3 ranks no tensor of this model is a multiple; DeepSpeed pads its reduce-scatter with uninitialised memory."""
    task: dict[str, Any] = {"ranks": 3, "batch": 9, "steps": STEPS, "options": {"stage": 3}}
    plain, coded = here(deepspeed, **task), here(deepspeed, **task, way="backend", warmup=2)
    assert "reduce_scatter" not in coded[0]["counts"] and sums(coded)["coded"] == 4
    assert len(digests(coded)) == 1 and abs(loss(coded) - loss(plain)) < 0.1


def test_nothing_is_compiled(deepspeed: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    here(deepspeed, steps=2)
    assert not list(tmp_path.iterdir())

"""Runs of DeepSpeed and of FSDP2 go on from their own checkpoints, to the bit, with the seeds of their codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.stack_helpers import digests, installed, other, sums
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.run import here

pytestmark = pytest.mark.xdist_group("ranks")
TASK: dict[str, Any] = {"way": "backend", "steps": 6, "warmup": 2}


def goes_on(stack: Stack, kind: str, folder: Path, **options: Any) -> None:
    """Six steps, and three after three that a checkpoint keeps, end with the same weights."""
    options["folder"] = str(folder)
    whole = here(stack, **TASK, options={**options, "save": 3})
    rest = here(stack, **TASK, options={**options, "resume": 3})
    assert len(rest[0]["runs"][0]["seconds"]) == 2, "three steps are left"
    assert digests(rest) == digests(whole) and len(digests(whole)) == 1
    assert sums(rest, kind)["coded"] / 3 == sums(whole, kind)["coded"] / 4, "two of six were exact, of the rest none"


def test_fsdp2(tmp_path: Path) -> None:
    goes_on(other(STACKS["fsdp"], "tests.lab.stack_fsdp_kept"), "reduce_scatter", tmp_path)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_deepspeed(stage: int, tmp_path: Path) -> None:
    stack = other(installed("deepspeed"), "tests.lab.stack_deepspeed_kept")
    goes_on(stack, "reduce_scatter" if stage == 3 else "all_reduce", tmp_path, stage=stage)

"""Accelerate: the losses of DDP, fewer bytes, equal replicas; and the name that it refuses on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.stack_helpers import digests, installed, sums
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.run import here

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 6
# The hook's exact steps and DDP's search for unused parameters share a group in two threads, and ranks can mix them up.
WARMUP = {"backend": 2, "hook": 0}
SAME_BUCKETS = {"find_unused_parameters": True}  # else DDP cuts them anew after the first step of a process


@pytest.fixture(scope="module")
def accelerate() -> Stack:
    return installed("accelerate")


@pytest.fixture(scope="module")
def plain(accelerate: Stack) -> list[dict[str, Any]]:
    return here(accelerate, steps=STEPS)


def test_it_trains_as_ddp_does(plain: list[dict[str, Any]]) -> None:
    """It deals batches out otherwise, so sums have other roundings."""
    alone = here(STACKS["ddp"], steps=STEPS)
    assert plain[0]["runs"][0]["valid"] == pytest.approx(alone[0]["runs"][0]["valid"], abs=1e-4)


@pytest.mark.parametrize("way", ("backend", pytest.param("hook", marks=pytest.mark.soak)))
def test_a_run_is_coded_and_goes_on_from_its_checkpoint(
    accelerate: Stack, plain: list[dict[str, Any]], way: str, tmp_path: Path
) -> None:
    task = {"way": way, "steps": STEPS, "warmup": WARMUP[way]}
    options = {"folder": str(tmp_path / "saved"), "ddp": SAME_BUCKETS}
    whole = here(accelerate, **task, options={**options, "save": 3})
    rest = here(accelerate, **task, options={**options, "resume": 3})
    assert len(rest[0]["runs"][0]["seconds"]) == 2, "three steps are left"
    assert digests(rest) == digests(whole) != digests(plain) and len(digests(whole)) == 1
    assert abs(whole[0]["runs"][0]["valid"] - plain[0]["runs"][0]["valid"]) < 0.2
    if way == "backend":
        assert sums(rest)["times"] > 7.4, "no exact steps again"
        assert sums(rest)["coded"] / 3 == sums(whole)["coded"] / 4, "two of six were exact"


REFUSED = """
import tq.backend
from accelerate import Accelerator, InitProcessGroupKwargs
Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="tq")])
"""


def test_on_cpus_it_refuses_the_name(accelerate: Stack) -> None:
    """Accelerate 1.15.0 takes gloo there whatever is asked for, and compares: so the group is made before."""
    path = os.pathsep.join([str(accelerate.folder), str(Path(__file__).resolve().parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, "-c", REFUSED], env=environment, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ValueError: Your assigned backend tq is not available, please use gloo"

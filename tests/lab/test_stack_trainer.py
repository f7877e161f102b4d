"""Hugging Face's Trainer: a small GPT-2 by backend, hook and optimizer, and on from the Trainer's own checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.stack_helpers import digests, installed, other, sums
from tq.lab.net import hosts
from tq.lab.net.hosts import Lab
from tq.lab.stacks.catalog import Stack
from tq.lab.stacks.compare import seen
from tq.lab.stacks.run import here, on_hosts

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 6
# The hook's exact steps and DDP's search for unused parameters share a group in two threads, and ranks can mix them up.
WARMUP = {"backend": 2, "optimizer": 2, "hook": 0}
WHY = hosts.obstacle()


@pytest.fixture(scope="module")
def trainer() -> Stack:
    return installed("trainer")


@pytest.fixture(scope="module")
def plain(trainer: Stack) -> list[dict[str, Any]]:
    return here(trainer, steps=STEPS)


@pytest.mark.parametrize("way", ("backend", "hook", "optimizer"))
def test_a_run_is_coded_and_goes_on_from_its_checkpoint(
    trainer: Stack, plain: list[dict[str, Any]], way: str, tmp_path: Path
) -> None:
    # Else DDP cuts its buckets anew after the first step of a process; the optimizer has its own.
    options = {"arguments": {} if way == "optimizer" else {"ddp_find_unused_parameters": True}}
    stack, task = other(trainer, "tests.lab.stack_trainer_kept"), {"way": way, "steps": STEPS, "warmup": WARMUP[way]}
    whole = here(stack, **task, options={**options, "folder": str(tmp_path)})
    resume = {**options, "resume": str(tmp_path / "checkpoint-3")}
    rest = here(stack, **task, options=resume)
    assert len(rest[0]["runs"][0]["seconds"]) == 2, "three steps are left"
    assert digests(rest) == digests(whole) != digests(plain) and len(digests(whole)) == 1
    assert abs(whole[0]["runs"][0]["valid"] - plain[0]["runs"][0]["valid"]) < 0.2
    if way == "backend":
        assert sums(rest)["times"] > 7.4, "no exact steps again"
        assert sums(rest)["coded"] / 3 == sums(whole)["coded"] / 4, "two of six were exact"
        file = tmp_path / "checkpoint-3" / "codes.json"
        hook, calls = json.loads(file.read_text())
        file.write_text(json.dumps([hook, {name: count + 1 for name, count in calls.items()}]))
        again = here(stack, **task, options=resume)  # with other seeds
        assert len(digests(again)) == 1 and digests(again) != digests(whole)


@pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")
def test_with_the_optimizer_ddp_sends_nothing(trainer: Stack) -> None:
    sent = {}
    for way in ("plain", "optimizer"):
        with Lab(2) as lab:
            sent[way] = seen(on_hosts(trainer, lab, way=way, steps=STEPS)).sent
    assert sent["optimizer"] < sent["plain"] / 6

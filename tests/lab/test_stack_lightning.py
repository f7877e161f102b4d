"""Lightning around DDP and FSDP2: the bits of PyTorch's own, by its launchers too, and what its hook does on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.stack_helpers import digests, installed, other, sums
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.run import here

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 6
# The hook's exact steps and DDP's search for unused parameters share a group in two threads, and ranks can mix them up.
WARMUP = {"backend": 2, "hook": 0}


@pytest.fixture(scope="module")
def lightning() -> Stack:
    return installed("lightning")


@pytest.fixture(scope="module")
def sharded() -> Stack:
    return installed("lightning_fsdp")


@pytest.mark.parametrize("start_method", ("popen", "fork"))
def test_the_call_of_the_manual_trains_and_on_cpus_without_the_hook(lightning: Stack, start_method: str) -> None:
    """``DDPStrategy(ddp_comm_hook=ddp_hook, ddp_comm_state=HookState(Codec()))``: Lightning 2.6.6 drops the hook."""
    stack = other(lightning, "tests.lab.stack_lightning_call", launcher="own")
    dropped = here(stack, steps=STEPS, options={"start_method": start_method})
    assert [found["hooked"] for found in dropped] == [0, 0], "Lightning registers it now: say so in its program"
    assert len(digests(dropped)) == 1 and dropped[0]["runs"][0]["valid"] < 4
    registered = here(stack, way="hook", steps=STEPS, options={"start_method": start_method})
    assert [found["hooked"] for found in registered] == [STEPS, STEPS]
    assert len(digests(registered)) == 1 and registered[0]["runs"][0]["valid"] < 4


@pytest.fixture(scope="module")
def alone() -> dict[str, list[dict[str, Any]]]:
    """PyTorch's DDP and FSDP2 on the backend, without Lightning."""
    return {engine: here(STACKS[engine], way="backend", steps=STEPS) for engine in ("ddp", "fsdp")}


@pytest.mark.parametrize("engine", ("ddp", "fsdp"))
def test_it_trains_to_the_bits_of_pytorch(
    lightning: Stack, sharded: Stack, alone: dict[str, list[dict[str, Any]]], engine: str
) -> None:
    around = here(lightning if engine == "ddp" else sharded, way="backend", steps=STEPS)
    assert len(digests(around)) == 1 and digests(around) == digests(alone[engine])
    assert sums(around, "all_reduce" if engine == "ddp" else "reduce_scatter")["times"] > 7.4


@pytest.mark.soak
@pytest.mark.parametrize("way", ("plain", "hook"))
@pytest.mark.parametrize("engine", ("ddp", "fsdp"))
def test_other_ways_end_with_the_bits_of_pytorch(lightning: Stack, sharded: Stack, engine: str, way: str) -> None:
    around = here(lightning if engine == "ddp" else sharded, way=way, steps=STEPS)
    assert len(digests(around)) == 1 and digests(around) == digests(here(STACKS[engine], way=way, steps=STEPS))


@pytest.mark.parametrize("start_method", ("popen", "fork"))
def test_its_own_launchers_take_the_name_of_the_backend(
    lightning: Stack, alone: dict[str, list[dict[str, Any]]], start_method: str
) -> None:
    stack = other(lightning, lightning.module, launcher="own")
    told = here(stack, way="backend", steps=STEPS, options={"start_method": start_method})
    assert digests(told) == digests(alone["ddp"]) and sums(told)["times"] > 7.4


@pytest.mark.parametrize("way", ("backend", pytest.param("hook", marks=pytest.mark.soak)))
@pytest.mark.parametrize("engine", ("ddp", "fsdp"))
def test_a_run_goes_on_from_its_checkpoint(
    lightning: Stack, sharded: Stack, engine: str, way: str, tmp_path: Path
) -> None:
    of, kind = (lightning, "all_reduce") if engine == "ddp" else (sharded, "reduce_scatter")
    stack, options = other(of, "tests.lab.stack_lightning_kept"), {"sharded": engine == "fsdp"}
    task = {"way": way, "steps": STEPS, "warmup": WARMUP[way]}
    whole = here(stack, **task, options={**options, "folder": str(tmp_path)})
    rest = here(stack, **task, options={**options, "resume": str(tmp_path / "step=3.ckpt")})
    assert len(rest[0]["runs"][0]["seconds"]) == 2, "three steps are left"
    assert digests(rest) == digests(whole) and len(digests(whole)) == 1
    if way == "backend":
        assert sums(rest, kind)["times"] > 7.4, "no exact steps again"
        assert sums(rest, kind)["coded"] / 3 == sums(whole, kind)["coded"] / 4, "two of six were exact"

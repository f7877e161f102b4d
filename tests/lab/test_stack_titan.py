"""torchtitan's sharding: plain and coded as FSDP2 itself, bit for bit."""

from __future__ import annotations

import pytest

from tests.lab.stack_helpers import digests, installed, sums
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.run import here

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 4


@pytest.fixture(scope="module")
def titan() -> Stack:
    return installed("titan")


@pytest.mark.parametrize("way", ("plain", "backend", pytest.param("hook", marks=pytest.mark.soak)))
def test_it_trains_as_fsdp_does(titan: Stack, way: str) -> None:
    """It sums gradients and divides the loss, so the numbers that are coded are half as large: a power of two."""
    told = here(titan, steps=STEPS, way=way)
    assert len(digests(told)) == 1 and digests(told) == digests(here(STACKS["fsdp"], steps=STEPS, way=way))
    if way == "backend":
        assert sums(told, "reduce_scatter")["times"] > 7.4

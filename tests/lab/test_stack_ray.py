"""Ray Train: two workers train as DDP does, plain and coded."""

from __future__ import annotations

import pytest

from tests.lab.stack_helpers import digests, installed, sums
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.run import here

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 4


@pytest.fixture(scope="module")
def ray() -> Stack:
    return installed("ray")


@pytest.mark.parametrize("way", (pytest.param("plain", marks=pytest.mark.soak), "backend"))
def test_it_trains_as_ddp_does(ray: Stack, way: str) -> None:
    told = here(ray, steps=STEPS, way=way)
    assert len(told) == 2 and digests(told) == digests(here(STACKS["ddp"], steps=STEPS, way=way))
    if way == "backend":
        assert sums(told)["times"] > 7.4

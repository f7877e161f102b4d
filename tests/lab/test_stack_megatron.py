"""Megatron-core's buckets on CPUs: plain as DDP, bit for bit; coded, with equal ranks."""

from __future__ import annotations

import pytest

from tests.lab.stack_helpers import digests, installed, sums
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.run import here

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 4


@pytest.fixture(scope="module")
def megatron() -> Stack:
    return installed("megatron")


def test_its_buckets_train_as_ddp_does(megatron: Stack) -> None:
    assert digests(here(megatron, steps=STEPS)) == digests(here(STACKS["ddp"], steps=STEPS))


def test_its_buckets_are_coded(megatron: Stack) -> None:
    coded = here(megatron, steps=STEPS, way="backend")
    assert len(digests(coded)) == 1 and coded[0]["counts"], "nothing was counted"
    assert sums(coded)["times"] > 7.4

"""Engines around a group in which something is wrong: all end, and say why."""

from __future__ import annotations

import re
import time

import pytest

from tests.lab.stack_helpers import installed, other
from tq.lab.stacks.run import StackFailed, here

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.soak]
LAUNCHED = (
    ("lightning", "torchrun", "popen"), ("lightning", "own", "popen"), ("lightning_fsdp", "torchrun", "popen"),
    ("accelerate", "torchrun", "popen"), ("trainer", "torchrun", "popen"),
)  # fmt: skip
FORKED = ("lightning", "own", "fork")  # with the settings of the process that forks


@pytest.mark.parametrize(
    ("name", "launcher", "start_method", "fault"),
    [(*how, fault) for how in LAUNCHED for fault in ("dies", "differs")] + [(*FORKED, "dies")],
)
def test_all_ranks_end_when_one_dies_or_differs(name: str, launcher: str, start_method: str, fault: str) -> None:
    stack = installed(name)
    options = {"fault": fault, "module": stack.module, "start_method": start_method}
    began = time.monotonic()
    with pytest.raises(StackFailed) as failed:
        here(other(stack, "tests.lab.stack_faulty", launcher=launcher), way="backend", steps=200, options=options)
    assert time.monotonic() - began < 90, "imports, data and three steps take most of it"
    said = {"dies": "exitcode *: -9|SIGKILL|Connection (closed|reset)", "differs": "GroupError: backend tq: rank 0 has"}
    assert re.search(said[fault], str(failed.value)), failed.value

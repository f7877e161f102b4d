"""Framing: single operations are measured, lists of them are added up, and what was not measured is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tq.lab import layout_framing
from tq.lab.layout_framing import Calls, beyond, expected
from tq.train.crew import crew

KNOWN = {
    "all-reduce 4": [(100.0, 10.0), (300.0, 30.0), (700.0, 30.0)],
    "reduce-scatter 4": [(100.0, 5.0), (200.0, 5.0)],
}


def test_between_sizes_it_is_a_line_and_below_them_a_constant() -> None:
    known = KNOWN["all-reduce 4"]
    assert [beyond(known, sent) for sent in (1.0, 100.0, 200.0, 500.0, 9999.0)] == [10.0, 10.0, 20.0, 30.0, 30.0]


def test_calls_of_all_ranks_are_added_up() -> None:
    calls = [("all-reduce", 4, 200.0, 3), ("reduce-scatter", 4, 150.0, 1)]
    alone = 3 * (200.0 + 20.0) + 2 * 150.0 + 5.0  # gloo sends a reduce-scatter's payload twice
    assert expected([calls], KNOWN) == pytest.approx(alone)
    assert expected([calls, calls[:1]], KNOWN) == pytest.approx(alone + 3 * 220.0)
    with pytest.raises(KeyError, match="broadcast 4"):
        expected([[("broadcast", 4, 8.0, 1)]], KNOWN)


def sends_and_hides(folder: Path, hidden: bool) -> tuple[list[tuple[str, int, float, int]], int]:
    x = torch.zeros(1000)
    dist.all_reduce(x)
    looks = [layout_framing.quiet_interface(), layout_framing.quiet_interface()]
    with Calls() as traffic:
        dist.all_reduce(x)
        dist.all_reduce(x[:10])
    if hidden:  # as a library would that sends by another way
        dist.all_reduce(torch.zeros(100))
    return traffic.listed(), layout_framing.quiet_interface() - 2 * looks[1] + looks[0]


@pytest.mark.parametrize("hidden", [False, True])
def test_what_nobody_counted_is_noticed(hidden: bool) -> None:
    alone = layout_framing.private_network()
    if not alone:
        pytest.skip("needs hosts: namespaces or token buckets are not allowed here")
    known = crew("tq.lab.layout_framing:ruler", 2, 60.0, alone, sizes=[64, 4096])[0]
    found = crew("tests.lab.test_layout_framing:sends_and_hides", 2, 60.0, alone, hidden=hidden)
    assert [tuple(each) for each in found[0][0]] == [("all-reduce", 2, 40.0, 1), ("all-reduce", 2, 4000.0, 1)]
    apart = found[0][1] / expected([calls for calls, _ in found], known) - 1
    assert (apart > 0.1) if hidden else (abs(apart) < 0.1), apart

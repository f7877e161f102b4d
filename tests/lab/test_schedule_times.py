"""Timed pipeline steps: waits are where they should be, the fit finds a cost that was put in, ranks overlap."""

from __future__ import annotations

import pytest
import torch

from tq.lab import schedule_times
from tq.systems.schedules import one_f_one_b, simulate, zb_h1


def test_each_pass_waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(schedule_times.time, "sleep", slept.append)
    part = schedule_times.Waits(1.0, 2.0, 4.0, first=False)
    x = torch.zeros(3, schedule_times.WIDTH, requires_grad=True)
    out = part(x).sum()
    assert slept == [1.0]
    torch.autograd.grad(out, x, retain_graph=True)
    assert slept == [1.0, 2.0]
    torch.autograd.grad(out, part.weight)
    assert slept == [1.0, 2.0, 4.0]


def test_the_fit_finds_the_cost_that_was_put_in() -> None:
    waits, order = [0.02, 0.02, 0.01], one_f_one_b(4, 8)
    seconds = simulate(order, schedule_times.cost_of(waits, 4, action=0.0015)).makespan
    assert schedule_times.fitted(order, waits, seconds) == pytest.approx(0.0015, rel=1e-6)
    assert schedule_times.fitted(order, waits, 0.01) == 0.0
    # the first stage's I is empty: its W is as long as its whole backward pass
    costs = schedule_times.cost_of(waits, 4)
    first = [action for action in zb_h1(4, 8)[0] if action.kind == "I"][0]
    assert costs.of(first) == 0.0 and costs.of(first._replace(kind="W")) == pytest.approx(0.03)


def test_steps_of_two_ranks() -> None:
    names = ["1f1b", "zbv", "zb-h2"]
    task = {"ranks": 2, "micro": 4, "waits": [0.02, 0.02, 0.01], "steps": 2, "names": names}
    found = schedule_times.times(task)
    for name in names:  # a wait is never shorter than asked, so no step is shorter than its waits
        assert min(found["steps"][name]) >= 0.999 * found["plain"][name]
        assert found["plain"][name] < 0.9 * 2 * 4 * 0.05  # and is simulated to overlap
    assert found["simulated"]["1f1b"] == pytest.approx(sorted(found["steps"]["1f1b"])[0], rel=0.5)
    with pytest.raises(ValueError, match="must hold '1f1b'"):
        schedule_times.times({**task, "names": ["zbv"]})

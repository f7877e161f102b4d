"""The same training on a virtual clock and on processes: equal losses where the order is equal, forecast times."""

import math

import pytest

from tq.lab import straggler_runs
from tq.lab.straggler_runs import Straggling, predicted, real, seconds_to, virtual
from tq.systems.stragglers import POLICIES

SHORT = {"ranks": 2, "steps": 8, "looks": 2, "base_s": 0.1, "slow_rank": 1, "max_bytes": 300_000}


@pytest.mark.parametrize("policy", range(len(POLICIES)))
def test_virtual_times_are_the_forecast(policy: int) -> None:
    task = SHORT | {"policy": policy, "steps": 32, "ranks": 3}
    found = virtual(task)
    assert found["step_s"] == pytest.approx(predicted(Straggling(**task))["step_s"])
    assert found["losses"][-1][1] < found["losses"][0][1] - 0.3 and found == virtual(task)


@pytest.mark.xdist_group("ranks")
def test_processes_train_what_the_virtual_clock_says() -> None:
    """A synchronous step takes the same gradients on both clocks, in whatever order they arrive."""
    found, expected = real(SHORT), virtual(SHORT)
    assert [loss for _, loss in found["losses"]] == pytest.approx([loss for _, loss in expected["losses"]], abs=1e-4)
    assert expected["step_s"] <= found["step_s"] < expected["step_s"] + 0.2


@pytest.mark.xdist_group("ranks")
def test_a_backup_rank_is_not_waited_for_on_processes() -> None:
    task = SHORT | {"policy": 1, "steps": 12}
    found = real(task)
    assert found["unused"] > 0 and found["step_s"] < 0.25 < Straggling(**SHORT).times[:12, 1].mean()


@pytest.mark.xdist_group("ranks")
def test_a_rank_that_the_kernel_stops_is_as_late_as_one_that_sleeps() -> None:
    slept, stopped = (real(SHORT | {"stopped": stop}) for stop in (False, True))
    assert slept["step_s"] == pytest.approx(stopped["step_s"], rel=0.3)
    assert [loss for _, loss in slept["losses"]] == pytest.approx([loss for _, loss in stopped["losses"]], abs=1e-4)


def test_the_outer_step_has_a_rate_of_its_own() -> None:
    task = SHORT | {"policy": 3, "steps": 32}
    low, plain, high = (virtual(task | {"outer_lr": lr})["losses"][-1][1] for lr in (0.35, 0.7, 1.0))
    assert plain == virtual(task)["losses"][-1][1] and len({low, plain, high}) == 3


def test_local_steps_change_the_training_and_not_the_data() -> None:
    losses = [virtual(SHORT | {"policy": p, "steps": 32})["losses"][-1][1] for p in (0, 3)]
    assert losses[0] != losses[1] and all(map(math.isfinite, losses))


def test_seconds_to_a_loss() -> None:
    line = [[0.0, 4.0], [1.0, 3.0], [2.0, 3.5], [3.0, 2.0]]
    assert seconds_to(3.25, line) == 0.75 and seconds_to(2.75, line) == 2.5
    assert seconds_to(1.0, line) is None and seconds_to(4.5, line) is None


def test_results_that_wait_are_the_ranks_own() -> None:
    run = Straggling(**SHORT)
    assert run.updates == 8 and Straggling(policy=2, steps=8, ranks=2).updates == 16
    assert Straggling(policy=4, steps=64).updates == 2 and run.times.shape[1] == 2
    assert straggler_runs.MODEL.seq == 64

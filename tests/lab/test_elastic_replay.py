"""An elastic run is the run of the same membership that nobody kills, in every bit; others are told apart."""

from __future__ import annotations

import pytest

from tq.lab import elastic_replay
from tq.lab.elastic_replay import PROGRAM, Run, differing, killed
from tq.lab.net import hosts
from tq.lab.net.hosts import Lab
from tq.train.crew import crew

WHY = hosts.obstacle()


def told(attempt: int, ranks: int, steps: range, at: float, all_told: bool = True) -> list[dict]:
    found = [
        {"attempt": attempt, "ranks": ranks, "rank": rank, "step": step, "at": at + step, "loss": "x", "weights": "y"}
        for step in steps for rank in range(ranks)
    ]  # fmt: skip
    return found if all_told else found[:-1]


def test_of_steps_that_were_taken_twice_the_last_counts() -> None:
    run = Run(told=told(11, 3, range(1, 9), 0.0, all_told=False) + told(12, 2, range(6, 8), 50.0))
    run.told += told(13, 3, range(6, 12), 100.0) + told(14, 2, range(11, 14), 200.0, all_told=False)
    assert run.membership() == [(3, 1, 5), (3, 6, 10), (2, 11, 12)]  # the second attempt left nothing
    assert sorted(run.steps()) == [*range(1, 13)]
    assert {step: one[0]["attempt"] for step, one in run.steps().items()}[6] == 13


def test_a_run_that_was_restarted_between_two_checkpoints_goes_back_to_the_one_before() -> None:
    run = Run(told=told(1, 3, range(1, 9), 0.0) + told(2, 3, range(6, 14), 50.0) + told(3, 2, range(6, 10), 99.0))
    assert run.membership() == [(3, 1, 5), (2, 6, 9)]


@pytest.fixture(scope="module")
def run() -> Run:
    """Two ranks, then three, then two again, without a kill."""
    members = [(2, 1, 2), (3, 3, 4), (2, 5, 6)]
    by_rank = crew(f"{PROGRAM}:replayed", 3, membership=members, task={"batch": 12, "steps": 20_000})
    ranks = {step: count for count, first, last in members for step in range(first, last + 1)}
    found = Run()
    for number, (_, first, last) in enumerate(members):
        some = [one for told in by_rank for one in told if first <= one["step"] <= last]
        found.told += [one | {"attempt": number, "ranks": ranks[one["step"]], "at": float(one["step"])} for one in some]
    assert found.membership() == members and len(found.told) == 2 * 2 + 3 * 2 + 2 * 2
    return found


def test_a_replay_repeats_every_bit(run: Run) -> None:
    assert differing(run) == (6, [])
    for step, ones in run.steps().items():
        assert len({one["weights"] for one in ones}) == 1, f"replicas differ after step {step}"


def test_another_membership_is_another_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "membership", lambda _: [(2, 1, 6)])
    assert differing(run) == (6, [3, 4, 5, 6])  # from where it parts from the run


@pytest.mark.soak
@pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")
def test_kills_leave_the_run_as_it_would_have_been() -> None:
    with Lab(3) as lab:
        run = killed(lab, 3, seed=1, progress=False)
    assert sorted(map(len, run.lost_s.values())) == [1, 1, 1] and max(map(max, run.lost_s.values())) < 60
    steps, wrong = differing(run)
    assert steps > 10 and wrong == []


def test_the_command_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        elastic_replay.main(["--hosts", "2"])
    assert "--hosts three or more" in capsys.readouterr().err

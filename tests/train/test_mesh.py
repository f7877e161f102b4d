"""The command trains under a plan and says which bytes went where."""

from __future__ import annotations

import pytest

from tq.train import mesh


def test_trains_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--pp 2 --dp 2 --micro 2 --steps 3 --forward-bits 8 --backward-bits 8 --timeout 120".split()
    assert mesh.main(arguments) == 0
    said = capsys.readouterr().out
    assert "4 ranks, 3 steps: loss 5.5" in said
    assert "all-reduce      over  2 ranks" in said and "send            over  2 ranks" in said
    sent = float(said.split("send            over  2 ranks")[1].split("...")[0].strip().replace(",", ""))
    full = 16 // 2 * mesh.CONFIG.seq * mesh.CONFIG.hidden * 4  # one edge, one way, fp32
    assert full / 4.1 < sent < full / 3.5


def test_a_plan_that_contradicts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh.main(["--sequence"]) == 2
    assert "sequence and losses need tp > 1" in capsys.readouterr().err


def test_a_searched_schedule_is_the_run_of_a_usual_one(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for schedule in ("1f1b", "searched --passes 1 1.1 0.7 --hold 1.5"):
        assert mesh.main(f"--pp 2 --micro 4 --steps 3 --timeout 120 --schedule {schedule}".split()) == 0
        said.append(capsys.readouterr().out)
    usual, ours = said
    assert ours.startswith("searched schedule: idle for ") and "(1F1B: 2" in ours.splitlines()[0]
    assert ours.splitlines()[1] == usual.splitlines()[0]  # the same losses, to four digits


def test_a_search_with_more_memory_waits_less() -> None:
    plan = mesh.Plan(pp=4, micro=8, schedule="own")
    shares = [float(mesh.found_order(plan, [1.0, 1.0, 1.0], hold)[1].split()[4].rstrip("%")) for hold in (1.0, 2.0)]
    assert shares[1] < shares[0] < 27.3  # 1F1B: 3 of 11


def test_what_no_schedule_can_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("--pp 2 --micro 4 --schedule searched --hold 0.2", "--schedule searched --chunks 2 --pp 2 --micro 4"):
        assert mesh.main(wrong.split()) == 2
        assert capsys.readouterr().err.strip()

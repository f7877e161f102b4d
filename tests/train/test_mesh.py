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

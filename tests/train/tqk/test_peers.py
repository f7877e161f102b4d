"""Peer memory: a lost host resumes from its partner with at most one step lost; a lost pair needs the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.tqk.pairs import DIES_AT
from tq.systems.renewal import survives
from tq.train.tqk.peers import holder_of

SCRIPT = Path(__file__).with_name("pairs.py")


@pytest.mark.parametrize("ranks", range(1, 12))
def test_everybody_is_held_by_somebody_else(ranks):
    holders = [holder_of(rank, ranks) for rank in range(ranks)]
    assert sorted(holders) == list(range(ranks)), "each holds one"
    assert ranks == 1 or all(rank != holder for rank, holder in enumerate(holders))


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("ranks", "lost", "resumes"),
    [(4, "", True), (4, "0", True), (4, "0,2", True), (4, "1,3", True), (4, "2,3", False), (3, "1", True)],
)
def test_lost_hosts(tmp_path, ranks, lost, resumes):
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(ranks), lost]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "as wanted" in done.stdout and (tmp_path / "killed").exists()
    for rank in range(ranks):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        if resumes:
            assert found["step"] >= DIES_AT - 1 and found["right"] and found["rank"] == rank
        else:
            assert found["step"] is None


def test_the_share_of_losses_that_is_survived_is_the_formulas():
    """Every way to lose 2 or 3 of 8 hosts, counted by who holds what."""
    from itertools import combinations

    for lost in (2, 3):
        ways = list(combinations(range(8), lost))
        survived = sum(all(holder_of(rank, 8) not in some for rank in some) for some in ways)
        assert survived / len(ways) == pytest.approx(survives(8, lost, "pairs"))

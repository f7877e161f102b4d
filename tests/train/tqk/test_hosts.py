"""Hosts of their own network are lost under torchrun: one resumes from its partner, a pair from the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.tqk.hosts import EVERY
from tq.lab.net import hosts
from tq.lab.net.hosts import Lab

WHY = hosts.obstacle()
SCRIPT = Path(__file__).with_name("hosts.py")


@pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")
def test_a_lost_host_resumes_from_its_partner_and_a_lost_pair_from_the_disk(tmp_path):
    with Lab(4) as lab:
        arguments = [str(SCRIPT), str(tmp_path), "16", "7:1,14:2+3"]
        # Without it workers find each other under a number of restarts that each launcher counts by itself.
        environment = {"PYTHONPATH": str(SCRIPT.parents[3]), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        lab.torchrun(arguments, max_restarts=10, timeout_s=240, env=environment)
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(4)] == ["True"] * 4
    told = [json.loads(line) for line in (tmp_path / "resumed").read_text().splitlines()]
    assert all(one["right"] for one in told)
    turns = [told[number : number + 4] for number in range(0, len(told), 4)]
    assert all({one["rank"] for one in turn} == set(range(4)) for turn in turns)
    assert all(len({(one["source"], one["step"]) for one in turn}) == 1 for turn in turns)
    resumed = [(turn[0]["source"], turn[0]["step"]) for turn in turns]
    assert resumed[0] == ("start", 0)
    assert ("peer", 6) in resumed, "step 7 was not begun: nothing is lost"
    assert ("disk", 13 // EVERY * EVERY) in resumed

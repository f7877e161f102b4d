"""SLURM on two hosts: srun starts the ranks, or torchrun, and they send an eighth; nothing stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.lab.stack_helpers import digests, sums
from tq.lab.net.hosts import HostsFailed, Lab
from tq.lab.stacks import slurm
from tq.lab.stacks.catalog import STACKS
from tq.lab.stacks.compare import seen
from tq.lab.stacks.slurm import Cluster, on_cluster

WHY = slurm.obstacle()
pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(WHY is not None, reason=WHY if WHY and WHY.startswith("needs") else f"needs SLURM: {WHY}"),
]
STEPS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Lab(2) as lab, Cluster(lab) as up:
        yield up


def test_a_task_runs_on_each_host(cluster: Cluster) -> None:
    said = cluster.srun(["sh", "-c", "echo $SLURM_PROCID of $SLURM_NTASKS on $(hostname -I)"], timeout_s=30)
    assert sorted(said.split("\n")) == ["", "0 of 2 on 10.71.0.11", "1 of 2 on 10.71.0.12"]


@pytest.mark.parametrize("torchrun", (False, True))
def test_training_is_coded_between_the_hosts(cluster: Cluster, torchrun: bool) -> None:
    plain, coded = (
        on_cluster(STACKS["ddp"], cluster, torchrun, timeout_s=200, steps=STEPS, way=way)
        for way in ("forward", "backend")
    )
    assert len(digests(coded)) == 1 and digests(coded) != digests(plain) and sums(coded)["times"] > 7.4
    assert 0 < seen(coded).sent < seen(plain).sent / 6


def test_a_program_that_fails_is_told(cluster: Cluster) -> None:
    # srun ends with the highest code: 3, or that of the other task where this one was still to be ended
    with pytest.raises(HostsFailed, match="(?s)srun: ended with (3|143)\\n.*said so"):
        cluster.srun([sys.executable, "-c", "import sys; print('said so'); sys.exit(3)"], timeout_s=30)
    with pytest.raises(HostsFailed, match="after 1 s still at work"):
        cluster.srun(["sleep", "60"], timeout_s=1)
    assert "0" in cluster.srun(["sh", "-c", "echo $SLURM_PROCID"], timeout_s=30), "the nodes are free again"


def test_nothing_stays() -> None:
    with Lab(2) as lab, Cluster(lab) as cluster:
        folder, daemons = cluster.folder, list(cluster._started)
        assert all(isinstance(each, subprocess.Popen) and each.poll() is None for each in daemons)
    assert len(daemons) == 4 and all(each.poll() is not None for each in daemons) and not folder.exists()

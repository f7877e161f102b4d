"""The studies of networks: on real ones at small sizes, and sweeps of the model by what must hold of them."""

from __future__ import annotations

import numpy as np
import pytest

from tq.lab import fabric_study, fabric_sweeps, fabric_tasks
from tq.lab.net import hosts

WHY = hosts.obstacle()
needs_hosts = pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")


@needs_hosts
def test_a_ring_on_a_real_network_is_near_its_model() -> None:
    found = fabric_study.collective("ring, packed", 4.0, 400_000, 1, 0)
    assert 0 < found["alpha"] < 0.5 * found["predicted"]
    assert found["measured"][0] == pytest.approx(found["predicted"], rel=0.5)  # a machine may be busy


@needs_hosts
def test_collisions_are_where_they_were_said() -> None:
    found = fabric_study.collisions(0, 300_000)
    assert found["carried"] > 0.98 and len(found["measured"]) == 4
    assert max(found["predicted"]) == pytest.approx(max(map(found["spines"].count, (0, 1))) * min(found["predicted"])
                                                    / min(map(found["spines"].count, found["spines"])))  # fmt: skip


@needs_hosts
def test_a_queue_is_one() -> None:
    found = fabric_study.queue(0.7, 400, 3)
    assert found["lost"] == 0 and 0.5 < found["load"] < 0.9
    assert found["measured"] == pytest.approx(found["same arrivals"], abs=0.6)
    assert found["formula"] == pytest.approx(found["exponential"] / 2)


def test_the_crossing_is_where_both_formulas_meet() -> None:
    """n = 8: 14 (a + (f S / 8 - b) / r) = 6 (a + (f S - b) / r), so S = 8 (a r - b) / (4.25 f)."""
    rate = fabric_study.FAR_MBIT * 1e6 / 8
    exact = 8 * (0.005 * rate - fabric_study.BURST) / 4.25 / fabric_study.ONE_WAY
    assert fabric_study.crossing_bytes(8, 5.0) == pytest.approx(exact, rel=1e-3)
    sizes = [1.0, 2.0, 4.0]
    assert fabric_study._crossing(sizes, [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(2.0)
    assert fabric_study._crossing(sizes, [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) is None


def test_sweeps_hold_what_must_hold() -> None:
    ratios, shares = [1, 4], [0, 0.5, 1]
    for policy in ("spray", "ecmp"):
        grid = np.array(fabric_sweeps.ring_grid(4, 4, ratios, shares, policy, 3))
        assert grid.shape == (2, 3) and (grid >= 1 - 1e-9).all() and (grid[1] >= grid[0] - 1e-9).all()
    hashed = [fabric_sweeps.ring_grid(4, 4, ratios, [1], "ecmp", 9, fewer=fewer)[1][0] for fewer in (False, True)]
    assert hashed[1] < hashed[0]  # one full uplink of a rack cannot be missed by a hash, and four slow ones can
    assert fabric_sweeps.lost(1.0, 0.1) == pytest.approx(0.1) and fabric_sweeps.lost(9.0, 0.1) == pytest.approx(0.5)
    slow = fabric_sweeps.binary_tree(5)
    assert slow["opposite"] == pytest.approx(16) and slow["neighbours"] == slow["ring"] == pytest.approx(1)
    assert slow["uniform"] == pytest.approx(8, rel=0.05)
    assert fabric_sweeps.crossing_share(5, slow["opposite"]) == pytest.approx(1.0)
    rows = fabric_sweeps.aggregate((4, 6), "spray", 1)
    assert [row["rate"] for row in rows] == pytest.approx([16, 54]) and fabric_sweeps.growth(rows) == pytest.approx(1)
    found = fabric_sweeps.compare(16, ("packed",), 1)
    assert len(found) == len(fabric_sweeps.CANDIDATES) * len(fabric_sweeps.TRAFFICS)
    assert all(row["slow"] > 0 and row["dollars"] > 0 for row in found)
    found = fabric_sweeps.compare(128, ("random",), 3)
    assert all(row["least"] <= row["slow"] <= row["most"] for row in found)
    slow = {(row["network"], row["traffic"]): row["slow"] for row in found}
    for name in fabric_sweeps.CANDIDATES:
        assert slow[name, "all at once"] <= slow[name, "all-to-all"] + 1e-9
    dollars = {row["network"]: row["dollars"] for row in found}
    assert dollars["torus"] > dollars["leaf-spine 4:1, sprayed"] < dollars["leaf-spine 1:1, sprayed"]


def test_every_task_of_the_plans_is_one_that_can_be_measured() -> None:
    for full in (False, True):
        plan = fabric_tasks.plan(full, 0)
        assert {t["what"] for t in plan} >= {"collective", "collisions", "failure", "rounds", "queue"}
        assert len({str(t) for t in plan}) == len(plan)
    with pytest.raises(KeyError):
        fabric_tasks.measure({"what": "dance"})

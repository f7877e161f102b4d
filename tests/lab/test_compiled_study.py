"""Plans of compiled steps beside others: budgets, bytes, and the interval of a gain."""

from __future__ import annotations

import random

import pytest

from tq.lab import compiled_study as study
from tq.lab.recompute_study import COMPILED, KEEP, best_single

SHAPE = dict(layers=2, hidden=64, heads=2, vocab=64, seq=64)


def test_methods_side_by_side() -> None:
    """Every plan saves what it said, and every knapsack what its budget allows, after all of them are compiled."""
    task = dict(shape=SHAPE, sequences=2, budgets=[0.5], knapsack=[0.5], tries=2, repeats=1, seed=0)
    rows = study.side_by_side(task)["rows"]
    plans = {name: row for name, row in rows.items() if row["planned"] is not None}
    assert set(plans) == {f"{study.PLANNED} 50%", f"{study.EXACT} 50%"}
    assert all(row["planned"] == row["kept"] for row in plans.values())
    whole = rows[KEEP]["kept"]
    for start in (study.PLANNED, study.EXACT, study.SAME_BYTES, study.TIMED):
        assert rows[f"{start} 50%"]["kept"] <= 0.5 * whole
        assert start == study.PLANNED or rows[f"{start} 50%"]["equal"]
    assert rows[f"{study.SAME_BYTES} 50%"]["kept"] > 0.75 * 0.5 * whole
    assert 0.35 * rows[study.MIN_CUT]["kept"] < rows["torch knapsack 50%"]["kept"] <= 0.55 * rows[study.MIN_CUT]["kept"]
    assert rows[COMPILED]["kept"] == pytest.approx(whole, rel=0.05)
    assert rows[COMPILED]["ratios"] == rows[KEEP]["ratios"] == [1.0]
    both = study.pooled([rows, rows])
    assert both[study.COMPILED]["ratios"] == [1.0, 1.0] and both[KEEP]["exact"]
    assert all(row["as planned"] for row in both.values())
    assert not both["uniform 4 bits"]["exact"] and both[f"{study.EXACT} 50%"]["exact"]
    assert len(both[f"{study.PLANNED} 50%"]["off"]) == 2
    seconds = study.in_seconds(rows)
    assert sorted(seconds[name]["ratios"][0] for name in (KEEP, COMPILED))[0] == 1.0
    assert best_single(rows, 0.5) not in plans
    coded, share = rows[f"{study.CODED_KNAPSACK} 50%"], rows["torch knapsack 50%"]["kept"]
    assert coded["kept"] < 0.6 * share and not coded["equal"] and 0 < coded["error"] < 0.5
    assert rows[f"{study.EXACT} 50%"]["error"] == 0.0


def test_a_gain_and_its_interval() -> None:
    """Of 1,000 draws of 41 turns at least 95 % of the intervals hold the true median."""
    draws, held = random.Random(0), 0
    for _ in range(1000):
        theirs = [1.2 + draws.gauss(0, 0.05) for _ in range(41)]
        ours = [a - 0.05 + draws.gauss(0, 0.03) for a in theirs]
        found, low, high = study.gain({"a": {"ratios": theirs}, "b": {"ratios": ours}}, "a", "b")
        held += low <= 5 <= high
    assert 950 <= held <= 992 and found == pytest.approx(5, abs=3)

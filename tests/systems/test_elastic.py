"""Runs replayed on traces of nodes: counted by hand, against the renewal model, and what must hold on every trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.systems import elastic, renewal, tables
from tq.systems.elastic import Job, Trace, replay

FOUR = Trace("four, then two, then three", ((0, 4, 0), (1000, 0, 2), (2000, 1, 0), (3000, 0, 0)))
PLAIN = Job(4, interval_s=100, write_s=0, restart_s=0)


def test_a_run_of_fixed_size_works_and_pays_while_it_has_all_its_nodes() -> None:
    found = replay(FOUR, PLAIN, draws=1)
    assert (found.work, found.paid, found.hits, found.seconds) == (4000, 4000, 1, 3000)
    holding = replay(FOUR, replace(PLAIN, holds=True), draws=1)
    assert (holding.work, holding.paid) == (4000, 4000 + 2000 + 3000)


def test_an_elastic_run_works_with_what_is_there() -> None:
    found = replay(FOUR, replace(PLAIN, least=1), draws=1)
    assert (found.work, found.paid, found.hits) == (9000, 9000, 1)
    assert found.useful == 1 and found.mean_nodes == 3
    assert replay(FOUR, replace(PLAIN, least=3), draws=1).work == 4000 + 3000


def test_a_removal_costs_the_work_since_the_last_checkpoint_and_a_restart() -> None:
    # 1,000 s are 3 cycles of 300 + 10 s and 70 s more; 100 s of restart after every change, the first one included.
    job = Job(4, 1, interval_s=300, write_s=10, restart_s=100)
    lost = replay(FOUR, job, draws=1)
    first = 2 * 300 * 4  # 900 s of work: 2 whole cycles, 280 s of the third are lost
    second = (2 * 300 + 280) * 2  # 900 s again; it saves before it grows
    third = (2 * 300 + 270) * 3  # 890 s, after 10 s of writing
    assert lost.work == pytest.approx(first + second + third)
    warned = replay(FOUR, replace(job, warned=True), draws=1)
    # The two nodes that stay write for 10 s: 890 s of work in the second part.
    assert warned.work == pytest.approx(first + 280 * 4 + (2 * 300 + 270) * 2 + third)


def test_a_checkpoint_counts_once_it_is_written() -> None:
    job = Job(2, 1, interval_s=5000, write_s=30, restart_s=0)
    early = Trace("all leave while it is written", ((0, 1, 0), (1000, 1, 0), (1010, 0, 2), (2000, 0, 0)))
    assert replay(early, job, draws=1).work == 0
    late = Trace("all leave after it", ((0, 1, 0), (1000, 1, 0), (1031, 0, 2), (2000, 0, 0)))
    assert replay(late, job, draws=1).work == 1000
    again = Trace("it grows again meanwhile", ((0, 1, 0), (1000, 1, 0), (1010, 1, 0), (2000, 0, 0)))
    assert replay(again, replace(job, wanted=3), draws=1).work == 1000 + 3 * (2000 - 1040)


def test_patience_waits_before_it_grows_again() -> None:
    job = Job(4, 1, interval_s=100, write_s=0, restart_s=0, patience_s=1500)
    assert replay(FOUR, job, draws=1).paid == 4 * 1000 + 2 * 1500 + 3 * 500


def test_a_fixed_run_with_a_spare_node_goes_on() -> None:
    trace = Trace("one of two leaves", ((0, 2, 0), (1000, 0, 1), (2000, 0, 0)))
    one = replay(trace, Job(1, interval_s=100, write_s=0, restart_s=200), draws=400)
    # 800 s of work, then 1,000 or, where its own node left, 800.
    assert one.hits == pytest.approx(0.5, abs=0.1)
    assert one.work == pytest.approx(1800 - 200 * one.hits)


def test_it_equals_the_renewal_model_where_nodes_are_replaced_at_once() -> None:
    times = np.cumsum(np.random.default_rng(3).exponential(11_133, 40_000))
    trace = Trace("failures", ((0.0, 8, 0), *((float(time), 1, 1) for time in times)))
    for interval, write, restart in ((1116.19, 60, 600), (3600, 60, 0), (300, 10, 100)):
        found = replay(trace, Job(8, interval_s=interval, write_s=write, restart_s=restart), draws=1)
        expected = 1 - renewal.waste(interval, write, 11_133, restart)
        assert found.useful == pytest.approx(expected, abs=0.004)


@st.composite
def somewhere(draw: st.DrawFn) -> Trace:
    time, there, events = 0.0, 0, []
    for _ in range(draw(st.integers(1, 12))):
        added, removed = draw(st.integers(0, 5)), draw(st.integers(0, there))
        events.append((time, added, removed))
        there += added - removed
        time += draw(st.integers(1, 4000))
    return Trace("some", (*events, (time, 0, 0)))


@given(somewhere(), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 3000))
def test_on_any_trace(trace: Trace, a: int, b: int, warned: bool, holds: bool, patience: int) -> None:
    job = Job(max(a, b), min(a, b), 200, 20, 50, patience, warned, holds)
    found = replay(trace, job, draws=2)
    assert -1e-6 <= found.work <= found.paid + 1e-6 and found.paid <= trace.node_seconds + 1e-6
    assert replay(trace, job, draws=2) == found
    if not warned:  # a warning costs nothing where a checkpoint does not
        one, other = (replay(trace, replace(job, write_s=0, warned=each), draws=2) for each in (False, True))
        assert one.work <= other.work + 1e-6
    free = replay(trace, Job(max(a, b), 1, 200, 0, 0, warned=True), draws=2)
    assert found.work <= free.work + 1e-6


def test_the_recorded_traces() -> None:
    found = elastic.traces()
    assert {name: trace.most for name, trace in found.items()} == {
        "bamboo-p3": 32, "bamboo-g4dn": 24, "aws-16-us-west-2a": 16, "aws-16-us-west-2c": 16,
        "aws-16-us-east-2b": 16, "aws-4-us-east-1f": 4, "aws-4-us-east-2a": 4, "aws-4-us-west-2c": 4,
    }  # fmt: skip
    for trace in found.values():
        there = np.cumsum([added - removed for _, added, removed in trace.events])
        assert (there >= 0).all() and trace.seconds > 10 * 3600


@pytest.mark.parametrize(
    ("changed", "said"),
    (
        ({"wanted": 0}, "wanted"),
        ({"least": 5}, "least=5 is more than wanted=4"),
        ({"interval_s": 0}, "interval_s"),
        ({"restart_s": -1}, "restart_s"),
    ),
)
def test_errors(changed: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **changed)


def test_a_broken_table(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "spot_traces.csv").write_text(",".join(elastic.COLUMNS) + "\na,5,1,0,there\na,5,1,0,there\n")
    monkeypatch.setattr(tables, "folder", lambda: tmp_path)
    elastic.traces.cache_clear()
    with pytest.raises(ValueError, match=r"spot_traces.csv, row 3"):
        elastic.traces()
    elastic.traces.cache_clear()

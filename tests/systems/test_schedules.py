"""Orders and their cost: published bubble rates to the digit, closed forms, brute force, and what must be refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems import tables
from tq.systems.pipeline import bubble_share
from tq.systems.schedule_search import placement, search
from tq.systems.schedules import (
    Action,
    Cost,
    check,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    ranks_of,
    simulate,
    zb_h1,
    zb_h2,
)

COLUMNS = (
    "model", "p", "m", "t_forward", "t_input", "t_weight", "t_transfer", "rate_1f1b", "rate_interleaved",
    "rate_zb_h1", "rate_zb_h2", "rate_zb_1p", "rate_zb_2p", "chunks", "kept",
)  # fmt: skip
ROWS = tables.read(tables.folder() / "zero_bubble.csv", COLUMNS)


def cost_of(row: dict[str, str], chunks: int = 1) -> Cost:
    forward, inputs, weights = (float(row[name]) / chunks for name in ("t_forward", "t_input", "t_weight"))
    return Cost(forward, inputs, weights, float(row["t_transfer"]))


@pytest.mark.parametrize("name, make", [("1f1b", one_f_one_b), ("zb_h1", zb_h1), ("zb_h2", zb_h2)])
def test_published_rates_to_four_digits(name: str, make: object) -> None:
    for row in ROWS:
        order = make(int(row["p"]), int(row["m"]))  # type: ignore[operator]
        assert simulate(order, cost_of(row)).bubble == pytest.approx(float(row[f"rate_{name}"]), abs=5.1e-5), row


def test_interleaved_is_above_the_paper_by_a_share_of_the_transfers() -> None:
    """The paper's rate is as if one of the 2 v passes through the ranks sent nothing; the whole difference is that."""
    for row in ROWS:
        p, m, v = int(row["p"]), int(row["m"]), int(row["chunks"])
        ours = simulate(interleaved(p, m, v), cost_of(row, v)).bubble
        without = simulate(interleaved(p, m, v), Cost(*(float(row[f"t_{k}"]) / v for k in KINDS))).bubble
        theirs = float(row["rate_interleaved"])
        assert 0 < ours - theirs <= 0.004
        assert (theirs - without) / (ours - without) == pytest.approx(1 - 1 / (2 * v), abs=0.03)


KINDS = ("forward", "input", "weight")


@pytest.mark.parametrize("row", [row for row in ROWS if row["p"] == "8" or row["m"] == "48"], ids=lambda r: r["m"])
def test_search_is_as_good_as_the_paper(row: dict[str, str]) -> None:
    p, m, kept = int(row["p"]), int(row["m"]), float(row["kept"])
    order = search(p, m, cost_of(row), 2 * p, kept=kept)
    check(order, m)
    timing = simulate(order, cost_of(row), kept)
    assert timing.bubble <= float(row["rate_zb_2p"]) + 0.005
    assert max(timing.in_flight) <= 2 * p


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_closed_forms_without_transfers(p: int, m: int, v: int) -> None:
    cost = Cost(1.0, 1.0, 1.0)
    for make in (gpipe, one_f_one_b):
        check(make(p, m), m)
        assert simulate(make(p, m), cost).bubble_of_makespan == pytest.approx(bubble_share(p, m))
    assert max(simulate(gpipe(p, m), cost).in_flight) == m
    assert max(simulate(one_f_one_b(p, m), cost).in_flight) == min(p, m)
    order = interleaved(p, p * m, v)
    check(order, p * m)
    assert simulate(order, cost).bubble_of_makespan == pytest.approx(bubble_share(p, p * m, v))
    check(looped_bfs(p, m, v), m)
    assert max(simulate(looped_bfs(p, m, v), cost).in_flight) == pytest.approx(m)


@given(st.integers(2, 10), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_zero_bubble_orders_of_equal_passes(p: int, more: int) -> None:
    m, cost = 2 * p * more, Cost(1.0, 1.0, 1.0)
    first, second = zb_h1(p, m), zb_h2(p, m)
    check(first, m)
    check(second, m)
    assert simulate(first, cost).span == 3 * m + p - 1  # (p - 1) (F + I - W)
    assert max(simulate(first, cost).in_flight) == p
    assert simulate(second, cost).bubble == pytest.approx(0.0)
    assert max(simulate(second, cost).in_flight) == 2 * p - 1
    assert simulate(second, cost).makespan == 3 * m + p - 1  # the last rank starts late: no gain if all wait for all


@given(
    st.integers(1, 6), st.integers(1, 8), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0, 3), st.floats(0, 1),
    st.floats(0, 1), st.sampled_from(["line", "v"]), st.floats(1.5, 14),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_search_gives_orders_that_run(
    p: int, m: int, f: float, i: float, w: float, c: float, kept: float, kind: str, limit: float
) -> None:
    cost = Cost(f, i, w, c)
    order = search(p, m, cost, limit, kind=kind, kept=kept)
    check(order, m)
    timing = simulate(order, cost, kept)
    assert max(timing.in_flight) <= limit + 1e-6
    assert timing.span >= max(timing.work) * (1 - 1e-9)
    assert {stage: rank for rank, held in enumerate(placement(p, kind)) for stage in held} == ranks_of(order)


def test_search_against_every_order_of_a_small_pipeline() -> None:
    """Two stages, two micro-batches: all interleavings of F, I and W on both ranks."""
    cost, best = Cost(2.0, 3.0, 1.0, 0.5), float("inf")
    lists = [
        [Action(kind, stage, micro) for kind, micro in order]
        for stage in range(2)
        for order in set(itertools.permutations([(k, m) for k in "FIW" for m in range(2)]))
        if all(order.index(("F", m)) < order.index(("I", m)) < order.index(("W", m)) for m in range(2))
        and all(order.index((k, 0)) < order.index((k, 1)) for k in "FIW")
    ]
    for first, second in itertools.product(*([a for a in lists if a[0].stage == s] for s in range(2))):
        try:
            best = min(best, simulate([first, second], cost).span)
        except ValueError:
            continue
    assert simulate(search(2, 2, cost, 2), cost).span == pytest.approx(best)


def test_refused() -> None:
    with pytest.raises(ValueError, match="stage 0 must be on one rank, is on 0 and 1"):
        simulate([[Action("F", 0, 0)], [Action("F", 0, 1)]], Cost(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="can not be run"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)]], Cost(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="stage 0 must do F and either B or I and W of micro-batch 1"):
        check(one_f_one_b(2, 1), 2)
    with pytest.raises(ValueError, match="other micro-batches"):
        check(one_f_one_b(2, 3), 2)
    with pytest.raises(ValueError, match="twice"):
        check([[Action("F", 0, 0), Action("F", 0, 0), Action("B", 0, 0)]], 1)
    with pytest.raises(ValueError, match="micro-batch 0"):  # W before its I
        check([[Action("F", 0, 0), Action("W", 0, 0), Action("I", 0, 0)]], 1)
    with pytest.raises(ValueError, match="multiple of stages"):
        interleaved(4, 6, 2)
    with pytest.raises(ValueError, match="forward"):
        Cost(-1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"no order holds at most 0\.5"):
        search(2, 2, Cost(1.0, 1.0, 1.0), 0.5)
    with pytest.raises(ValueError, match="placement must be one of line, v"):
        placement(2, "w")


def test_stages_of_unequal_length_and_dispatch() -> None:
    timing = simulate(gpipe(2, 1), Cost([1.0, 2.0], [1.0, 2.0], [0.5, 0.5], action=0.1))
    assert timing.work == pytest.approx([2.7, 4.7])
    assert timing.makespan == pytest.approx(7.4)


def test_passes_that_exchange_messages_and_results_that_leave_late() -> None:
    cost = Cost(1.0, 1.0, 1.0, message=0.5)
    assert [cost.of(Action(kind, 0, 0)) for kind in "FIWB"] == [1.5, 1.5, 1.0, 2.5]
    order = [[Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)],
             [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)]]  # fmt: skip
    plain = Cost(1.0, 1.0, 1.0)
    assert simulate(order, plain).starts[1][0] == 1.0
    late = simulate(order, plain, late=[Action("F", 0, 0)])
    assert late.starts[1][0] == 2.0  # waits for the second F of rank 0, too
    assert late.makespan == simulate(order, plain).makespan + 1

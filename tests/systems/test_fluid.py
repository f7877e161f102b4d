"""Max-min fair rates and completion times: against SimGrid, by the law that defines them, and in the time they have."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems import fabrics, fluid
from tq.systems.routing import Router, Routes

RECORDED = json.loads((Path(__file__).parent / "simgrid" / "cases.json").read_text())


def routes_of(flows: list[list[int]], shares: Any = None) -> Routes:
    lengths = [len(flow) for flow in flows]
    flow = np.repeat(np.arange(len(flows)), lengths)
    link = np.array([link for way in flows for link in way], np.int64)
    share = np.ones(len(link)) if shares is None else np.asarray(shares, float)
    return Routes(flow, link, share, np.array(lengths, np.int64))


def many(count: int, seed: int) -> tuple[Routes, np.ndarray]:
    """So many random cases beside one another, without a link in common: 1 to 12 links, 1 to 12 flows, any shares."""
    rng = np.random.default_rng(seed)
    flows: list[np.ndarray] = []
    shares, rates, first = [], [], 0
    for _ in range(count):
        links = int(rng.integers(1, 13))
        for _ in range(int(rng.integers(1, 13))):
            way = rng.permutation(links)[: rng.integers(1, 5)]
            flows.append(first + way)
            shares.append(rng.choice([1.0, 0.5, 0.25, 1 / 3], len(way)))
        rates.append(10 ** rng.uniform(-3, 3, links))
        first += links
    return routes_of([f.tolist() for f in flows], np.concatenate(shares)), np.concatenate(rates)


def test_equal_to_simgrid() -> None:
    """Rates at the start and completion times of 1,567 flows in 80 cases (simgrid/make.py), to 1e-9."""
    assert RECORDED["made_by"].startswith("SimGrid 3.32") and len(RECORDED["cases"]) >= 50
    for case in RECORDED["cases"]:
        routes = routes_of(case["flows"])
        assert fluid.max_min(routes, case["links"]) == pytest.approx(np.array(case["rates"]), rel=1e-9)
        times = fluid.completion_times(routes, case["links"], case["sizes"])
        assert times == pytest.approx(np.array(case["times"]), rel=1e-9)


def one_after_another(flows: list[list[int]], rates: list[float]) -> list[float]:
    """The textbook's algorithm, a bottleneck at a time, in exact fractions."""
    from fractions import Fraction

    left, found = [Fraction(rate) for rate in rates], {}
    while len(found) < len(flows):
        users = {k: [f for f, way in enumerate(flows) if k in way and f not in found] for k in range(len(rates))}
        link = min((k for k in users if users[k]), key=lambda k: left[k] / len(users[k]))
        share = left[link] / len(users[link])
        for f in users[link]:
            found[f] = share
            for k in flows[f]:
                left[k] -= share
    return [float(found[f]) for f in range(len(flows))]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_equal_to_the_textbook(data: st.DataObject) -> None:
    links = data.draw(st.integers(1, 7))
    way = st.lists(st.integers(0, links - 1), min_size=1, max_size=4, unique=True)
    flows = data.draw(st.lists(way, min_size=1, max_size=12))
    rates = data.draw(st.lists(st.integers(1, 10**6).map(float), min_size=links, max_size=links))
    assert fluid.max_min(routes_of(flows), rates) == pytest.approx(one_after_another(flows, rates), rel=1e-9)


def test_every_flow_has_a_bottleneck_in_ten_thousand_cases() -> None:
    routes, rates = many(10_000, 3)
    found = fluid.max_min(routes, rates)
    over, missed = fluid.bottleneck_gap(routes, rates, found)
    assert over < 1e-9 and missed < 1e-9


def test_the_check_itself_finds_what_is_not_fair() -> None:
    routes, rates = routes_of([[0], [0, 1], [1]]), [1.0, 2.0]
    fair = fluid.max_min(routes, rates)
    assert fair == pytest.approx([0.5, 0.5, 1.5])
    assert fluid.bottleneck_gap(routes, rates, fair) == (0.0, 0.0)
    assert fluid.bottleneck_gap(routes, rates, [0.6, 0.4, 1.6])[1] > 0.1  # all links full, and unfair
    assert fluid.bottleneck_gap(routes, rates, fair * 0.9)[1] == pytest.approx(0.1)  # fair, and links idle
    assert fluid.bottleneck_gap(routes, rates, fair * 1.1)[0] == pytest.approx(0.1)


def test_a_thousand_hosts_in_a_second() -> None:
    fabric = fabrics.fat_tree(16)
    assert fabric.hosts == 1024
    a, b = np.random.default_rng(0).integers(0, 1024, (2, 4096))
    start = time.process_time()
    routes = Router(fabric).route(a, b, "ecmp")
    found = fluid.max_min(routes, fabric.rates)
    assert time.process_time() - start < 1.0
    finite = np.where(np.isfinite(found), found, 0.0)
    assert max(fluid.bottleneck_gap(routes, fabric.rates, finite)) < 1e-9


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_laws_of_completion(seed: int, factor: float) -> None:
    routes, rates = many(3, seed)
    sizes = np.random.default_rng(seed).uniform(0, 5, routes.flows)
    times = fluid.completion_times(routes, rates, sizes)
    assert fluid.completion_times(routes, rates * factor, sizes * factor) == pytest.approx(times, rel=1e-9)
    bytes_ = np.bincount(routes.link, routes.share * sizes[routes.flow], len(rates))
    assert times.max() >= (bytes_ / rates).max() * (1 - 1e-12)  # no link carries more than it can
    alone = np.array([(routes.share / rates[routes.link] * sizes[routes.flow])[routes.flow == f].max()
                      for f in range(routes.flows)])  # fmt: skip
    assert (times >= alone * (1 - 1e-12)).all()
    assert fluid.slowest_s(routes, rates, sizes) == pytest.approx(times.max())


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_flows_of_one_size_end_with_the_fullest_link(seed: int) -> None:
    routes, rates = many(4, seed)
    assert fluid.slowest_s(routes, rates, 2.0) == pytest.approx(
        fluid.completion_times(routes, rates, 2.0).max(), rel=1e-9
    )


def test_edges() -> None:
    nothing = routes_of([[], [0]])
    assert fluid.max_min(nothing, [2.0]).tolist() == [np.inf, 2.0]
    assert fluid.completion_times(nothing, [2.0], 4.0, 0.5).tolist() == [0.5, 2.5]
    assert fluid.max_min(nothing, [2.0], [True, False]).tolist() == [np.inf, 0.0]
    assert fluid.slowest_s(routes_of([[]]), [1.0], 3.0) == 0.0
    dead = routes_of([[0], [1]])
    assert fluid.max_min(dead, [0.0, 1.0]).tolist() == [0.0, 1.0]
    for call in (fluid.completion_times, fluid.slowest_s):
        with pytest.raises(ValueError, match="a link of rate 0 and never ends"):
            call(dead, [0.0, 1.0], 1.0)
    with pytest.raises(ValueError, match="rates must have an entry for each link, got 1 for link 1"):
        fluid.max_min(dead, [1.0])
    with pytest.raises(ValueError, match="rates must be 0 or more and finite"):
        fluid.max_min(dead, [1.0, float("nan")])
    with pytest.raises(ValueError, match="sizes must be 0 or more"):
        fluid.completion_times(dead, [1.0, 1.0], -1.0)

"""Rates of flows that share links as fairly as may be, and when they are through: a network as a system of pipes.

Max-min fairness: no flow can get more without another one, that has no more than it, getting less. It holds if and only
if every flow crosses a bottleneck: a link that is full and on which no flow is faster than it. TCP comes near to it;
windows, losses and queues are not modelled.

Source: Bertsekas, Gallager 1992 (Data Networks), section 6.5.2. Instead of one link after another, all links that
are a bottleneck for each of their flows are settled at once, which gives the same rates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tq.systems.arguments import positive
from tq.systems.fabrics import Floats, Ints
from tq.systems.routing import Routes

_TIE = 1e-12  # relative: fair shares that are as close as this are one


def _lowest(values: Floats, index: Ints, count: int) -> Floats:
    """Least value of each index; inf where there is none. index: sorted."""
    found = np.full(count, np.inf)
    if len(index):
        first = np.flatnonzero(np.diff(index, prepend=-1))
        found[index[first]] = np.minimum.reduceat(values, first)
    return found


def max_min(routes: Routes, rates: Any, active: Any = None) -> Floats:
    """Max-min fair rate of every flow, float64 [flows], in the unit of the links' rates.

    Arguments:
        routes: which flow loads which link with which share of its rate.
        rates: of the links, 0 or more, float [links].
        active: bool [flows], flows that send; the others get 0. Default: all.

    A flow without links gets inf.
    """
    capacity = np.array(rates, dtype=float)
    positive("rates", capacity, zero=True, finite=True)
    if routes.link.size and routes.link.max() >= capacity.size:
        raise ValueError(f"rates must have an entry for each link, got {capacity.size} for link {routes.link.max()}")
    sends = np.ones(routes.flows, bool) if active is None else np.asarray(active, bool)
    result = np.where(sends, np.inf, 0.0)
    keep = sends[routes.flow] & (routes.share > 0)
    flow, link, share = routes.flow[keep], routes.link[keep], routes.share[keep]
    left, links = capacity.copy(), capacity.size
    by_link = np.argsort(link, kind="stable")
    while len(flow):
        load = np.bincount(link, share, links)
        fair = np.full(links, np.inf)
        np.divide(left, load, out=fair, where=load > 0)
        of_flow = _lowest(fair[link], flow, routes.flows)
        slowest = _lowest(of_flow[flow[by_link]], link[by_link], links)
        settled = (load > 0) & (slowest >= fair * (1 - _TIE))
        done = np.zeros(routes.flows, bool)
        done[flow[settled[link]]] = True
        result[done] = of_flow[done]
        gone = done[flow]
        left = np.maximum(0.0, left - np.bincount(link[gone], share[gone] * result[flow[gone]], links))
        stays = ~gone
        number = np.cumsum(stays) - 1
        by_link = number[by_link[stays[by_link]]]
        flow, link, share = flow[stays], link[stays], share[stays]
    return result


def bottleneck_gap(routes: Routes, rates: Any, found: Any) -> tuple[float, float]:
    """How far rates are from max-min fairness: (most that a link is over its rate, most by which a flow misses a
    bottleneck), both relative. Both are 0 for max-min fair rates, and only for them."""
    capacity, x = np.asarray(rates, float), np.asarray(found, float)
    flow, link, share = routes.flow, routes.link, routes.share
    keep = share > 0
    flow, link, share = flow[keep], link[keep], share[keep]
    if not len(flow):
        return 0.0, 0.0
    scale = capacity.max() or 1.0
    load = np.bincount(link, share * x[flow], capacity.size)
    over = float(np.max((load - capacity) / np.maximum(capacity, 1e-300 + scale * 1e-12)))
    by_link = np.argsort(link, kind="stable")
    fastest = -_lowest(-x[flow[by_link]], link[by_link], capacity.size)
    spare = (capacity[link] - load[link]) / np.maximum(capacity[link], scale * 1e-12)
    faster = (fastest[link] - x[flow]) / np.maximum(fastest[link], scale * 1e-12)
    return max(0.0, over), float(np.max(_lowest(np.maximum(spare, faster), flow, routes.flows)[np.unique(flow)]))


def completion_times(routes: Routes, rates: Any, sizes: Any, latencies: Any = 0.0) -> Floats:
    """When each flow is through if all start at 0 and share max-min fairly at every moment, float64 [flows].

    sizes: of the flows, in the unit of the rates times that of the result, 0 or more; latencies: added at the end.
    Raises ValueError where a flow crosses a link of rate 0.
    """
    size = np.broadcast_to(np.asarray(sizes, float), (routes.flows,))
    positive("sizes", size, zero=True, finite=True)
    used = np.zeros(routes.flows, bool)
    used[routes.flow] = True
    left, end, now = np.where(used, size, 0.0), np.zeros(routes.flows), 0.0
    while (active := left > 0).any():
        speed = max_min(routes, rates, active)
        if (speed[active] <= 0).any():
            raise ValueError("a flow crosses a link of rate 0 and never ends")
        wait = np.full(routes.flows, np.inf)
        np.divide(left, speed, out=wait, where=active)
        step = wait.min()
        now += step
        done = active & (wait <= step * (1 + 1e-12))
        left = np.where(active, np.maximum(0.0, left - speed * step), 0.0)
        left[done] = 0.0
        end[done] = now
    return end + np.asarray(latencies, float)


def slowest_s(routes: Routes, rates: Any, sizes: Any) -> float:
    """When the last flow is through. Flows of one size end with the fullest link, whose flows keep their rate; only
    other sizes need the whole course of ``completion_times``."""
    size = np.broadcast_to(np.asarray(sizes, float), (routes.flows,))
    if not routes.flows or not len(routes.flow):
        return 0.0
    if np.ptp(size[np.unique(routes.flow)]) > 0:
        return float(completion_times(routes, rates, size).max())
    capacity = np.asarray(rates, float)
    bytes_ = np.bincount(routes.link, routes.share * size[routes.flow], capacity.size)
    if (capacity[bytes_ > 0] <= 0).any():
        raise ValueError("a flow crosses a link of rate 0 and never ends")
    return float(np.max(bytes_[bytes_ > 0] / capacity[bytes_ > 0], initial=0.0))

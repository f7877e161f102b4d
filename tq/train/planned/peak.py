"""The plan that takes the least memory at once: for the largest batch, or the largest model, under a limit."""

from __future__ import annotations

from typing import Any

from torch import nn

from tq.systems.rematerialization import Choice, cheapest
from tq.train.planned.plan import Plan, Priced, priced_trace

_CLOSE = 0.01  # of the bytes that autograd keeps, to which the lowest peak by blocks is found
_GAP, _ANY = 0.02, 1.0  # of the optimum; any choice that fits
_LOOSE = (1.0, 1.05, 1.15)  # times that peak
_SHARES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)  # of what autograd keeps, to store
_SECONDS = 5.0  # at most of one search


def plan_lowest_peak(model: nn.Module, batch: Any, **options: Any) -> Plan:
    """Trace one step of a model, and choose what makes its activations take the fewest bytes at once in backward.

    What is stored, decoded and computed again counts, as in ``Plan.peak_bytes``; gradients do not. Of plans with that
    peak, to 1 % of what autograd keeps, the fastest that was found is taken. Every search ends after five seconds, and
    costs are measured, so two calls may find different plans, on a busy machine higher ones.

    Args:
        model, batch: as of ``plan_activations``.
        options: of the same, but for ``budget``, ``peak`` and ``noise``.

    Returns:
        Plan, for ``with compress_activations(plan=plan): loss = ...``.

    Raises:
        TypeError, ValueError: as ``plan_activations``.

    Example:
        >>> import torch
        >>> from tq.train.planned import plan_activations, plan_lowest_peak
        >>> model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())])
        >>> low = plan_lowest_peak(model, torch.ones(256, 64), progress=False)
        >>> low.peak_bytes < 0.6 * low.bytes_before
        True
    """
    return lowest_peak(priced_trace(model, batch, **options))


def lowest_peak(priced: Priced) -> Plan:
    """The plan of a traced step with the lowest peak that is found; of those within 1 % of it, the fastest.

    By blocks the lowest peak is found by halving. Node by node a plan may hold less or more than by blocks, so plans
    that may hold a little more, or that may store less, are looked at too.
    """
    graph, ties = priced.trace.graph, priced.trace.ties
    whole = graph.nbytes

    def choose(share: float, peak: float | None, gap: float = _GAP) -> Choice | None:
        try:
            return cheapest(graph, share * whole, peak=peak, ties=ties, gap=gap, time_limit_s=_SECONDS)
        except ValueError:  # nothing fits
            return None

    low, high = 0.0, 2.0 * whole
    while high - low > _CLOSE * whole / 2:
        middle = (low + high) / 2
        low, high = (low, middle) if choose(1.0, middle, _ANY) else (middle, high)
    tries = [(1.0, loose * high) for loose in _LOOSE] + [(share, None) for share in _SHARES]
    choices = {frozenset(found.stored.items()): found for at in tries if (found := choose(*at)) is not None}
    plans = [priced.plan(choice) for choice in choices.values()]
    if not plans:
        raise ValueError("no plan fits: a value that backward needs can neither be stored nor computed again")
    least = min(plan.peak_bytes for plan in plans)
    return min((p for p in plans if p.peak_bytes <= least + _CLOSE * whole), key=lambda plan: plan.seconds)

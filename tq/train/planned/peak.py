"""The plan that takes the least memory at once: for the largest batch, or the largest model, under a limit."""

from __future__ import annotations

from typing import Any

from torch import nn

from tq.systems.peak_search import groups, lowered, quickened
from tq.systems.rematerialization import Choice, cheapest
from tq.train.planned.plan import Plan, Priced, priced_trace

_CLOSE = 0.02  # of the lowest peak, by which a faster plan may be higher
_SHARES = (0.03, 0.05, 0.12, 0.3, 1.0)  # of what autograd keeps, that the plans to start from store
_GAP = 0.05  # of the optimum, for those


def plan_lowest_peak(model: nn.Module, batch: Any, **options: Any) -> Plan:
    """Trace one step of a model, and choose what makes its activations take the fewest bytes at once in backward.

    What is stored, decoded and computed again counts, as in ``Plan.peak_bytes``; gradients do not. Plans that store
    little are changed as long as that lowers the peak, then as long as it saves time and raises the peak by no more
    than 2 %. That no plan is lower is not proven. Costs are measured, so two calls may find different plans.

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
    return lowest_peak(priced_trace(model, batch, **options), progress=options.get("progress", True))


def lowest_peak(priced: Priced, *, progress: bool = False) -> Plan:
    """The plan of a traced step with the lowest peak that is found; of those within 2 % of it, the fastest.

    ValueError where a value that backward needs can neither be stored nor computed again.
    """
    from tqdm import tqdm

    graph, ties = priced.trace.graph, priced.trace.ties
    among, ends = groups(graph, ties), list[Choice]()
    for share in tqdm(_SHARES, unit="start", desc="lowest peak", disable=not progress, dynamic_ncols=True):
        try:
            start = cheapest(graph, share * graph.nbytes, ties=ties, gap=_GAP)
        except (ValueError, TimeoutError):  # nothing fits, or is found
            continue
        ends.append(lowered(graph, start, among))
    if not ends:
        raise ValueError("no plan fits: a value that backward needs can neither be stored nor computed again")
    low = lowered(graph, min(ends, key=lambda choice: priced.plan(choice).peak_bytes), among, pairs=True)
    most = (1 + _CLOSE) * priced.plan(low).peak_bytes
    near = [low, *(choice for choice in ends if priced.plan(choice).peak_bytes <= most)]
    return min((priced.plan(quickened(graph, choice, among, most)) for choice in near), key=lambda plan: plan.seconds)

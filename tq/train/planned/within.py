"""The fastest plan under a limit of memory, where the batch is given and not the largest that fits."""

from __future__ import annotations

from typing import Any

from torch import nn

from tq.systems.backward_timeline import timeline
from tq.systems.peak_search import groups, lowered, quickened
from tq.systems.rematerialization import Choice, cheapest
from tq.train.planned.plan import Plan, Priced, priced_trace

_SHARES = (0.03, 0.05, 0.12, 0.2, 0.3, 0.5, 1.0)  # of what autograd keeps, that the plans to start from store
_GAP = 0.05  # of the optimum, for those


def plan_within_peak(model: nn.Module, batch: Any, peak: int, **options: Any) -> Plan:
    """Trace one step of a model, and choose what makes it fast while its activations never take more than some bytes.

    What is stored, decoded and computed again counts, as in ``Plan.peak_bytes``; gradients do not. Plans for several
    budgets are changed until they stay within the limit, then as long as that saves time. That none is faster is not
    proven. Costs are measured, so two calls may find different plans. ``plan_lowest_peak`` says about what the least
    is; so near to it that its own search was needed, this may find none.

    Args:
        model, batch: as of ``plan_activations``.
        peak: bytes that activations may take at any moment of backward.
        options: of ``plan_activations``, but for ``budget``, ``peak`` and ``noise``.

    Returns:
        Plan, for ``with compress_activations(plan=plan): loss = ...``.

    Raises:
        TypeError, ValueError: as ``plan_activations``; no plan is found that stays within the limit.

    Example:
        >>> import torch
        >>> from tq.train.planned import plan_within_peak
        >>> model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())])
        >>> plan = plan_within_peak(model, torch.ones(256, 64), 400_000, progress=False)
        >>> plan.peak_bytes <= 400_000 < plan.bytes_before
        True
    """
    if isinstance(peak, bool) or not isinstance(peak, int) or peak <= 0:
        raise ValueError(f"peak must be a positive number of bytes, got {peak!r}")
    return within_peak(priced_trace(model, batch, **options), peak, progress=options.get("progress", True))


def within_peak(priced: Priced, peak: int, *, progress: bool = False) -> Plan:
    """The fastest plan of a traced step that is found within a peak of so many bytes.

    ValueError where none is.
    """
    from tqdm import tqdm

    graph, ties = priced.trace.graph, priced.trace.ties
    among, ends, least = groups(graph, ties), list[Choice](), graph.nbytes
    for share in tqdm(_SHARES, unit="start", desc="within a peak", disable=not progress, dynamic_ncols=True):
        try:
            choice = cheapest(graph, share * graph.nbytes, ties=ties, gap=_GAP)
        except (ValueError, TimeoutError):  # nothing fits, or is found
            continue
        if max(timeline(graph, choice)) > peak:
            choice = lowered(graph, choice, among)
        if (held := priced.plan(choice).peak_bytes) <= peak:
            ends.append(quickened(graph, choice, among, peak))
        least = min(least, held)
    if not ends:
        raise ValueError(f"no plan was found with a peak of at most {peak:,} bytes; the lowest has {least:,}")
    return priced.plan(min(ends, key=lambda choice: choice.seconds))

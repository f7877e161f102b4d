"""The fastest plan within a peak: it stays within, what has more room is no slower, and too little is refused."""

from __future__ import annotations

import pytest
import torch

from tests.train.planned.test_peak import blocks, traced
from tq.train.planned import compress_activations, plan_within_peak
from tq.train.planned.peak import lowest_peak
from tq.train.planned.within import within_peak


@pytest.mark.parametrize("bits", [(), (4,)])
def test_a_plan_stays_within_its_peak_and_more_room_is_faster(bits: tuple[int, ...]) -> None:
    priced = traced(bits)
    low, whole = lowest_peak(priced), priced.trace.graph.nbytes
    plans = [within_peak(priced, int(low.peak_bytes * (1 - s) + 1.5 * whole * s)) for s in (0.05, 0.2, 1.0)]
    assert all(b.seconds <= 1.02 * a.seconds for a, b in zip(plans, plans[1:], strict=False))
    assert plans[0].peak_bytes <= 0.95 * low.peak_bytes + 0.075 * whole
    assert plans[0].seconds < low.seconds
    with pytest.raises(ValueError, match=r"no plan was found with a peak of at most 1 bytes; the lowest has [\d,]+"):
        within_peak(priced, 1)


def test_more_room_than_all_takes_keeps_all() -> None:
    priced = traced((4,))
    plan = within_peak(priced, 2 * priced.trace.graph.nbytes)
    assert plan.bytes_after == priced.trace.graph.nbytes and plan.seconds == priced.replanned(1.0).seconds


def test_a_step_holds_what_was_planned() -> None:
    model, x = blocks(4), torch.randn(256, 64)
    model(x).sum().backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plan = plan_within_peak(model, x, 900_000, bits=(), progress=False)
    with compress_activations(plan=plan) as usage:
        loss = model(x).sum()
    loss.backward()
    assert usage.most == plan.peak_bytes <= 900_000 < plan.bytes_before
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(exact, found, strict=True))


@pytest.mark.parametrize("peak", [0, -1, 1.5, True])
def test_a_peak_that_is_no_number_of_bytes_is_refused(peak: object) -> None:
    with pytest.raises(ValueError, match="peak must be a positive number of bytes"):
        plan_within_peak(blocks(1), torch.ones(4, 64), peak, progress=False)  # type: ignore[arg-type]

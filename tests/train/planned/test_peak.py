"""The plan with the lowest peak: no plan for a budget is lower, and a step holds what the plan says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tq.systems.rematerialization import least_bytes
from tq.train.model import GPT, GPTConfig
from tq.train.planned import compress_activations, plan_activations, plan_lowest_peak
from tq.train.planned.peak import lowest_peak
from tq.train.planned.plan import Priced, priced_trace


def blocks(depth: int, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                           for _ in range(depth)])  # fmt: skip


def traced(bits: tuple[int, ...]) -> Priced:
    model = GPT(GPTConfig(layers=3, hidden=64, heads=2, vocab=256, seq=64))
    ids = torch.randint(0, 256, (4, 64))
    return priced_trace(model, (ids, ids), bits=bits, repeats=1, progress=False)


@pytest.mark.parametrize("bits", [(), (4,)])
def test_no_plan_for_a_budget_is_lower(bits: tuple[int, ...]) -> None:
    priced = traced(bits)
    plan, whole = lowest_peak(priced), priced.trace.graph.nbytes
    least = least_bytes(priced.trace.graph)
    assert least is not None
    others = [priced.replanned(share) for share in (0.05, 0.1, 0.2, 0.3, 0.5, 1.0) if share * whole >= least]
    assert plan.peak_bytes <= min(other.peak_bytes for other in others) + 0.01 * whole
    with pytest.raises(ValueError, match="no plan was found"):
        priced.replanned(1.0, peak=int(0.7 * plan.peak_bytes))


def test_a_step_holds_what_was_planned_and_its_gradients_are_exact_without_codes() -> None:
    model, x = blocks(4), torch.randn(256, 64)
    plan = plan_lowest_peak(model, x, bits=(), progress=False)
    model(x).sum().backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with compress_activations(plan=plan) as usage:
        loss = model(x).sum()
    loss.backward()
    assert usage.most == plan.peak_bytes < 0.6 * plan.bytes_before
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(exact, found, strict=True))


def test_codes_go_lower_and_a_deeper_model_needs_a_smaller_share() -> None:
    x = torch.randn(256, 64)
    with_codes, without, deep = (
        plan_lowest_peak(blocks(depth), x, bits=bits, progress=False)
        for depth, bits in ((4, (4,)), (4, ()), (12, (4,)))
    )
    assert with_codes.peak_bytes < without.peak_bytes
    assert deep.peak_bytes / deep.bytes_before < with_codes.peak_bytes / with_codes.bytes_before


def test_equal_blocks_of_which_the_last_returns_what_nobody_asks_for_can_be_planned() -> None:
    """From eight equal blocks on they are tied; the result of the last is not saved, unlike those of the others."""
    model, x = blocks(10), torch.randn(256, 64)
    plan = plan_activations(model, x, 0.5, bits=(), progress=False)
    with compress_activations(plan=plan) as usage:
        loss = model(x).sum()
    loss.backward()
    assert usage.stored == plan.bytes_after <= 0.5 * plan.bytes_before

"""The largest batch under a limit of memory: the search, the limit itself, and PyTorch's knapsack as a rival."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tq.lab import ceiling_study as study
from tq.lab.recompute_study import KEEP, batch_of
from tq.train.model import GPT, GPTConfig
from tq.train.planned.peak import lowest_peak
from tq.train.planned.plan import priced_trace

SHAPE = dict(layers=2, hidden=64, heads=2, vocab=64, seq=64)


@pytest.mark.parametrize("start", [1, 4, 200])
@pytest.mark.parametrize("most", [0, 1, 9, 75, 127, 128])
def test_the_search_ends_within_a_sixteenth_of_what_fits(most: int, start: int) -> None:
    asked = []

    def fits(task: dict) -> dict:
        asked.append(task["sequences"])
        assert task["steps"] == 1 and "start" not in task
        return {"fits": task["sequences"] <= most, "seconds": None}

    with mock.patch.object(study, "fits", fits):
        found = study.largest_batch({"shape": SHAPE, "method": KEEP, "ceiling": 1, "start": start})
    assert found["batch"] <= most <= found["batch"] + max(1, found["batch"] // 16) - (found["batch"] < 16)
    assert found["tries"] == len(asked) == len(set(asked))


@pytest.mark.parametrize("ceiling, fits", [(1 << 18, False), (64 << 20, True)])
def test_the_limit_decides_what_fits(ceiling: int, fits: bool) -> None:
    task = dict(shape=SHAPE, method=KEEP, sequences=8, ceiling=ceiling, steps=1)
    found = study.fits(task)
    assert found["fits"] is fits and (found["seconds"] is not None) is fits


def test_the_knapsack_trains_as_the_plain_model_does_and_keeps_less() -> None:
    config = GPTConfig(**SHAPE)
    ids = batch_of(config, 4)
    plain, model = GPT(config, seed=0), GPT(config, seed=0)
    forward = study.knapsack(model, 0.1)
    for _ in range(2):
        model.zero_grad()
        loss = forward(ids, ids)[1]
        kept = sum(t.nbytes for t in loss.grad_fn.saved_tensors if t.numel() > 4 * 64 * 2)
        loss.backward()
    whole = plain(ids, ids)[1]
    whole.backward()
    assert torch.allclose(loss, whole, rtol=1e-5)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-6)
    trace = priced_trace(plain, (ids, ids), repeats=1, progress=False).trace
    weights = sum(p.nbytes for p in model.parameters())
    assert kept - weights < 0.3 * trace.graph.nbytes


def test_a_plan_without_codes_gives_the_gradients_of_keeping_all() -> None:
    config = GPTConfig(**SHAPE)
    ids, model = batch_of(config, 4), GPT(config, seed=0)
    plan = lowest_peak(priced_trace(model, (ids, ids), bits=(), repeats=1, progress=False))
    gradients = []
    for context in (study._always(study.planned(plan=plan)), study.nullcontext):
        model.zero_grad()
        with context():
            loss = model(ids, ids)[1]
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("method", [study.EXACT_PLAN, study.CODED_CHECKPOINTS])
def test_what_was_added_runs_under_a_limit(method: str) -> None:
    task = dict(shape=SHAPE, method=method, sequences=8, ceiling=64 << 20, steps=1)
    assert study.fits(task)["fits"] and not study.fits({**task, "ceiling": 1 << 18})["fits"]

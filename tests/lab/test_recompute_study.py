"""The instruments against what is known of small models."""

from __future__ import annotations

import sys

import pytest
import torch

from tq.lab import recompute_study as study
from tq.lab.training_step import blocks_again
from tq.train.activations import EXACT, compress_activations
from tq.train.model import GPT, GPTConfig

SHAPE = dict(layers=2, hidden=64, heads=2, vocab=64, seq=64)


def loss_of(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(ids, ids)[1]
    return found


def test_what_is_kept_is_what_hooks_see() -> None:
    """Two counters that share nothing: storages alive, and tensors that autograd saves."""
    model, ids = GPT(GPTConfig(**SHAPE)), study.batch_of(GPTConfig(**SHAPE), 2)
    with compress_activations(bits=EXACT) as report:
        loss_of(model, ids)
    alive = study.kept_bytes(model, lambda: loss_of(model, ids))
    assert report.bytes_before <= alive <= report.bytes_before + 2048  # and a few numbers of the loss
    assert study.saved_bytes(model, lambda: loss_of(model, ids)) == pytest.approx(alive, abs=2048)
    with blocks_again(model):
        assert study.kept_bytes(model, lambda: loss_of(model, ids)) < alive / 2


def test_segments_give_the_same_gradients() -> None:
    model, ids = GPT(GPTConfig(**{**SHAPE, "layers": 5})), study.batch_of(GPTConfig(**SHAPE), 2)
    parameters = list(model.parameters())
    plain = torch.autograd.grad(loss_of(model, ids), parameters)
    with study.segments_again(model, 2):
        again = torch.autograd.grad(loss_of(model, ids), parameters)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_every_graph_of_the_knapsack_keeps_to_its_own_budget() -> None:
    """Asked for after all are compiled, as it is done when methods take turns."""
    shape = GPTConfig(**SHAPE)
    made = study.compiled_forwards(shape, study.batch_of(shape, 2), (0.5, 0.25))
    kept = {name: study.saved_bytes(model, forward) for name, (model, forward) in made.items()}
    whole = kept[study.COMPILED]
    assert 0.35 * whole < kept["torch knapsack 50%"] <= 0.55 * whole
    assert 0.15 * whole < kept["torch knapsack 25%"] <= 0.3 * whole


def test_methods_side_by_side() -> None:
    found = study.side_by_side(dict(shape=SHAPE, sequences=2, knapsack=[], repeats=1, seed=0))
    rows = found["rows"]
    assert all(row["kept"] == row["planned"] for row in rows.values() if row["planned"] is not None)
    assert len(rows) >= 15 and rows[study.KEEP]["ratios"] == [1.0]
    best = study.best_single(rows, 0.5)
    assert best is not None and rows[best]["kept"] <= 0.5 * rows[study.KEEP]["kept"]
    assert study.best_single(rows, 1e-6) is None


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA and /proc are Linux's")
def test_a_ceiling_refuses_what_does_not_fit() -> None:
    assert study.fits(SHAPE, study.KEEP, 1, 64 << 20, 0.1, 1)["fits"]
    assert not study.fits(SHAPE, study.KEEP, 64, 24 << 20, 0.1, 1)["fits"]


def test_runs_that_share_a_seed_are_the_same_but_for_the_plan() -> None:
    shape = dict(layers=2, hidden=32, heads=2, vocab=256, seq=32)
    task = dict(shape=shape, steps=2, batch=2, seed=0, most_text=200_000)
    kept = [study.trained({**task, "share": share}) for share in (None, None, 0.2)]
    assert kept[0] == kept[1] and kept[2]["kept"] <= 0.2
    assert kept[2]["valid"] == pytest.approx(kept[0]["valid"], abs=0.05)

"""Learned scales: predictions come closer, codes and stored bits stay, and a run goes on after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.infer.helpers import sharp
from tq import Codec
from tq.infer.evaluate import divergence
from tq.infer.layers import QuantizedLinear, layers, stored_bits
from tq.infer.tuning import Tuned, tune
from tq.infer.weights import load, quantize, save
from tq.train.model import GPT, GPTConfig

CODEC = Codec(bits=3, block=64, scale_dtype=torch.bfloat16)


@pytest.fixture(scope="module", params=("gelu", "swiglu"))
def model(request: pytest.FixtureRequest) -> GPT:
    return sharp(GPTConfig(layers=2, hidden=64, heads=2, vocab=97, seq=48, kv_heads=1, activation=request.param), 4)


@pytest.fixture(scope="module")
def small(model: GPT) -> GPT:
    return quantize(model, CODEC, ids(8), head=Codec(bits=4, block=64))


def ids(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(97, (rows, 48), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norms", [True, False])
def test_predictions_come_closer_and_only_scales_and_norms_change(model: GPT, small: GPT, norms: bool) -> None:
    before = {name: value.clone() for name, value in small.state_dict().items()}
    flags = [parameter.requires_grad for parameter in small.parameters()]
    better = tune(small, model, ids(64, seed=2), steps=60, rate=3e-3, norms=norms)
    held_out = ids(16, seed=1)
    after_S, before_S = (divergence(model, each, held_out).kl_ST.mean(1) for each in (better, small))
    assert sum(after_S < before_S) >= 13, "13 of 16 texts: by chance once in 94"
    assert stored_bits(better) == stored_bits(small)
    after = better.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    scales = {f"{name}.scales" for name, layer in layers(small, head=True) if isinstance(layer, QuantizedLinear)}
    assert [*after] == [*before] and scales <= changed
    assert all("norm" in name for name in changed - scales) and bool(changed - scales) is norms
    assert all(after[name].dtype == value.dtype for name, value in before.items())
    # the given model is as it was
    assert all(torch.equal(small.state_dict()[name], value) for name, value in before.items())
    assert flags == [p.requires_grad for p in small.parameters()] and all(p.grad is None for p in small.parameters())


def test_what_was_learned_is_kept_with_the_codes(model: GPT, small: GPT, tmp_path: Path) -> None:
    better = tune(small, model, ids(8), steps=3)
    save(better, tmp_path / "small.safetensors")
    assert divergence(better, load(tmp_path / "small.safetensors"), ids(2)).kl == 0


class Killed(Exception):
    pass


def test_a_run_goes_on_where_it_was_ended(model: GPT, small: GPT, tmp_path: Path) -> None:
    whole = tune(small, model, ids(8), steps=45, batch=2).state_dict()
    told: list[int] = []

    def until(step: int):
        def ends(each: Tuned) -> None:
            told.append(each.done)
            if each.done == step:
                raise Killed

        return ends

    keep = tmp_path / "kept.tqk"
    for step in (10, 33):  # before anything was kept, and after
        with pytest.raises(Killed):
            tune(small, model, ids(8), steps=45, batch=2, keep=keep, progress=until(step))
    again = tune(small, model, ids(8), steps=45, batch=2, keep=keep, progress=until(-1))
    assert told == [*range(1, 11), *range(1, 34), *range(21, 46)]
    assert all(torch.equal(value, whole[name]) for name, value in again.state_dict().items())
    told.clear()
    tune(small, model, ids(8), steps=45, batch=2, keep=keep, progress=until(-1))
    assert told == [], "it was done"
    tune(small, model, ids(8), steps=3, batch=2, keep=keep, progress=until(-1))
    assert told == [1, 2, 3], "another run"
    keep.write_bytes(keep.read_bytes()[:-9])
    told.clear()
    tune(small, model, ids(8), steps=3, batch=2, keep=keep, progress=until(-1))
    assert told == [1, 2, 3], "damaged"


def test_every_sequence_comes_once_before_any_comes_again() -> None:
    from tq.infer.tuning import _batch

    given = torch.arange(7)[:, None]
    seen = torch.cat([_batch(given, 2, step, 0) for step in range(7)]).flatten().tolist()
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7)) and seen[:7] != seen[7:]


def test_what_does_not_fit_is_refused(model: GPT, small: GPT) -> None:
    with pytest.raises(ValueError, match="no quantized layer"):
        tune(model, model, ids(4), steps=1)
    other = GPT(GPTConfig(layers=1, hidden=64, heads=2, vocab=97, seq=48))
    with pytest.raises(ValueError, match="another shape"):
        tune(small, other, ids(4), steps=1)
    for bad in ({"steps": 0}, {"batch": 5}, {"batch": 0}):
        with pytest.raises(ValueError, match="steps must be positive and batch between 1 and 4"):
            tune(small, model, ids(4), **bad)

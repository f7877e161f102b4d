"""Laws of the loop: exact resume, schedule, decoupled decay, refusal of what does not fit."""

from __future__ import annotations

import copy
import io
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tq.train.model.corpus import Corpus, load
from tq.train.model.gpt import GPT, PRESETS, GPTConfig
from tq.train.model.loop import TrainConfig, Trainer, learning_rate, parameter_groups

MODEL = GPTConfig(layers=2, hidden=32, heads=2, vocab=256, seq=32)
RUN = TrainConfig(steps=12, batch=4, warmup=3, lr=3e-3)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load(max_bytes=400_000)


def trainer(corpus: Corpus, config: TrainConfig = RUN, seed: int = 0) -> Trainer:
    return Trainer(GPT(MODEL, seed), corpus, config)


def through_a_file(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop", [0, 2, 7, 12])
def test_stop_and_resume_gives_the_same_bits(corpus: Corpus, stop: int, autocast: torch.dtype | None):
    config = replace(RUN, autocast=autocast)
    unbroken = trainer(corpus, config)
    unbroken.train(progress=False)
    first = trainer(corpus, config)
    first.train(stop, progress=False)
    torch.manual_seed(stop)  # nothing depends on the global generator
    second = trainer(corpus, config, seed=5)  # other weights: all must come from the state
    second.load_state_dict(through_a_file(first.state_dict()))
    second.evaluate(1)
    second.train(progress=False)
    assert second.losses == unbroken.losses and second.steps_done == 12
    for a, b in zip(second.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_files_resume_too_and_are_written_whole(corpus: Corpus, tmp_path: Path):
    first, second = trainer(corpus), trainer(corpus, seed=3)
    first.train(4, progress=False)
    first.save(tmp_path / "deep" / "run.tqk")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.tqk"]
    second.load(tmp_path / "deep" / "run.tqk")
    assert second.train(progress=False) == first.train(progress=False)


def test_training_learns_and_draws_nothing(corpus: Corpus):
    state = torch.get_rng_state()
    config = TrainConfig(steps=100, batch=8, seq=64, lr=3e-3, warmup=10)
    run = Trainer(GPT(PRESETS["tiny"]), corpus, config)
    before = run.evaluate(2)
    losses = run.train(progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert before == pytest.approx(math.log(256), abs=0.2)
    counts = torch.bincount(corpus.train.to(torch.int64)).double()
    p = counts[counts > 0] / counts.sum()
    unigram = -(p * p.log()).sum().item()
    assert run.evaluate(4) < unigram - 0.4 and len(losses) == 100


def test_schedule():
    config = TrainConfig(steps=100, warmup=10, lr=2.0, final_lr=0.25)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0 and max(rates) == 2.0
    assert rates[55] == pytest.approx((2.0 + 0.5) / 2)  # half way between peak and end
    assert rates[100] == pytest.approx(0.5)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert learning_rate(0, replace(config, warmup=0)) == 2.0
    assert [TrainConfig(steps=steps).warmup_steps for steps in (1, 9, 250)] == [0, 0, 25]


def test_every_parameter_stands_in_one_group(corpus: Corpus):
    model = GPT(MODEL)
    decayed, free = parameter_groups(model, 0.3)
    assert decayed["weight_decay"] == 0.3 and free["weight_decay"] == 0.0
    assert all(p.ndim >= 2 for p in decayed["params"]) and all(p.ndim < 2 for p in free["params"])
    both = [*decayed["params"], *free["params"]]
    assert len(both) == len({id(p) for p in both}) == len(list(model.parameters()))


def test_decay_is_decoupled(corpus: Corpus):
    plain, decayed = (trainer(corpus, replace(RUN, weight_decay=decay)) for decay in (0.0, 0.5))
    start = [p.detach().clone() for p in plain.model.parameters()]
    for run in (plain, decayed):
        run.step()
    shrink = learning_rate(0, RUN) * 0.5
    for p0, a, b in zip(start, plain.model.parameters(), decayed.model.parameters(), strict=True):
        expected = a - shrink * p0 if p0.ndim >= 2 else a
        torch.testing.assert_close(b, expected, atol=1e-7, rtol=0)


def test_the_gradient_is_clipped_by_its_global_norm(corpus: Corpus):
    config = replace(RUN, grad_clip=1e-3, lr=1.0, warmup=0)
    run = Trainer(GPT(MODEL), corpus, config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0))
    run.optimizer.param_groups[0]["weight_decay"] = 0.0
    start = [p.detach().clone() for p in run.model.parameters()]
    run.step()
    moved = sum((p - p0).square().sum() for p, p0 in zip(run.model.parameters(), start, strict=True)).sqrt()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


def test_evaluation_is_the_same_for_every_data_seed_and_changes_nothing(corpus: Corpus):
    a, b = trainer(corpus), trainer(corpus, replace(RUN, seed=9))
    assert a.evaluate(2) == b.evaluate(2) == a.evaluate(2)
    assert a.model.training and a.evaluate(2, "train") != a.evaluate(2)
    b = trainer(corpus)
    assert a.train(3, progress=False) == b.train(3, progress=False)
    assert trainer(corpus, replace(RUN, seed=9)).step() != b.losses[0]


def test_a_loss_that_is_not_finite_changes_nothing(corpus: Corpus):
    run = trainer(corpus)
    run.train(2, progress=False)
    with torch.no_grad():
        run.model.final_norm.weight[3] = math.nan
    before = copy.deepcopy(run.state_dict())
    with pytest.raises(FloatingPointError, match="step 2: loss nan"):
        run.step()
    after = run.state_dict()
    assert run.steps_done == 2
    for name, value in before["model"].items():
        torch.testing.assert_close(after["model"][name], value, rtol=0, atol=0, equal_nan=True)
    for index, state in before["optimizer"]["state"].items():
        assert all(torch.equal(state[key], after["optimizer"]["state"][index][key]) for key in state)


def test_a_state_of_another_run_is_refused(corpus: Corpus):
    state = trainer(corpus).state_dict()
    with pytest.raises(ValueError, match=r"config.lr: 0.003, here 0.1"):
        trainer(corpus, replace(RUN, lr=0.1)).load_state_dict(state)
    other = Trainer(GPT(replace(MODEL, ffn=16)), corpus, RUN)
    with pytest.raises(ValueError, match="model.ffn: None, here 16"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="corpus.sha256"):
        trainer(replace(corpus, sha256="another")).load_state_dict(state)
    with pytest.raises(ValueError, match=r"missing \['format', 'losses', 'run', 'scaler', 'skipped'\]"):
        trainer(corpus).load_state_dict({"model": {}, "optimizer": {}})
    with pytest.raises(ValueError, match="format 99"):
        trainer(corpus).load_state_dict({**state, "format": 99})


def test_a_refused_state_changes_nothing(corpus: Corpus):
    run, other = trainer(corpus), trainer(corpus)
    other.train(2, progress=False)
    state = other.state_dict()
    weights = copy.deepcopy(run.model.state_dict())
    groups = [{**state["optimizer"]["param_groups"][0], "params": [0]}]
    first = next(iter(state["model"]))
    cut = {**state["model"], first: torch.zeros(3)}
    for bad, message in (
        ({**state, "optimizer": {**state["optimizer"], "param_groups": groups}}, "param"),
        ({**state, "model": cut}, f"state of another model .{first}"),
        ({**state, "run": {**state["run"], "workers": 2}}, "workers: 2, here None"),
        ({**state, "run": 3}, "run is 3"),
        (3, "not a trainer state but int"),
    ):
        with pytest.raises(ValueError, match=message):
            run.load_state_dict(bad)
        assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    assert run.steps_done == 0


def test_numbers_of_numpy_are_saved_as_plain_ones(corpus: Corpus, tmp_path: Path):
    config = replace(RUN, lr=np.float64(3e-3), seed=np.int64(0), weight_decay=np.float32(0.5), grad_clip=np.float64(1))
    run = trainer(corpus, config)
    run.train(2, progress=False)
    run.save(tmp_path / "run.tqk")
    again = trainer(corpus, config)
    again.load(tmp_path / "run.tqk")
    assert again.steps_done == 2


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda part, to: (order.append("name"), rename(part, to)))
    trainer(corpus).save(tmp_path / "run.tqk")
    assert order == ["sync", "name", "sync"]  # the file, then its name, then the folder that holds the name


def test_a_damaged_checkpoint_is_refused_and_a_failed_save_leaves_nothing(corpus: Corpus, tmp_path: Path):
    run = trainer(corpus)
    run.train(2, progress=False)
    path = tmp_path / "run.tqk"
    run.save(path)
    content = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(content), 20):
        damaged = bytearray(content)
        damaged[place] ^= 4
        (tmp_path / "bad.tqk").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"no whole checkpoint .{len(content)} bytes"):
            run.load(tmp_path / "bad.tqk")
    run.load(path)
    run.state_dict = lambda: {"skipped": lambda: None}  # type: ignore[method-assign]  # nothing that can be saved
    with pytest.raises(TypeError, match="cannot hold a function"):
        run.save(path)
    assert path.read_bytes() == content and sorted(f.name for f in tmp_path.iterdir()) == ["bad.tqk", "run.tqk"]


def test_a_checkpoint_is_smaller_than_its_tensors(corpus: Corpus, tmp_path: Path):
    run = trainer(corpus)
    run.train(3, progress=False)
    run.save(tmp_path / "run.tqk")
    state = run.state_dict()
    moments = [m for each in state["optimizer"]["state"].values() for m in each.values() if torch.is_tensor(m)]
    whole = sum(tensor.nbytes for tensor in [*state["model"].values(), *moments])
    assert (tmp_path / "run.tqk").stat().st_size < 0.95 * whole


def test_progress_shows_loss_and_speed(corpus: Corpus, capsys: pytest.CaptureFixture[str]):
    run = trainer(corpus)
    losses = run.train(3)
    shown = capsys.readouterr().err
    assert f"loss {losses[-1]:.3f}" in shown and "tokens/s" in shown and "3/3" in shown


def test_missing_tqdm_names_the_extra(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"tq-book\[lab\]"):
        trainer(corpus).train(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"batch": 1.5}, "batch must be"),
        ({"seq": -1}, "seq must be"),
        ({"warmup": 13}, "between 0 and steps=12, got 13"),
        ({"lr": math.inf}, "lr must be"),
        ({"final_lr": 2}, "final_lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"grad_clip": 0.0}, "grad_clip"),
        ({"autocast": torch.float64}, "autocast"),
        ({"accumulate": 3}, "accumulate must divide batch=4"),
        ({"accumulate": 0}, "accumulate"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"eps": math.inf}, "eps must be positive and finite"),
        ({"lr": "much"}, "lr must be a number, got 'much'"),
        ({"compile": "yes"}, "compile must be True or False"),
    ],
)
def test_a_bad_configuration_is_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **change)


def test_a_model_that_does_not_fit_is_refused(corpus: Corpus):
    with pytest.raises(ValueError, match="256 tokens, the model's vocab is only 100"):
        Trainer(GPT(replace(MODEL, vocab=100)), corpus, RUN)
    with pytest.raises(ValueError, match="seq=33 is longer than the model's 32"):
        trainer(corpus, replace(RUN, seq=33))
    with pytest.raises(ValueError, match="until must be between 0 and steps=12, got 13"):
        trainer(corpus).train(13, progress=False)
    with pytest.raises(ValueError, match="batches must be positive"):
        trainer(corpus).evaluate(0)


def test_accumulated_micro_batches_give_the_gradient_of_the_batch(corpus: Corpus):
    whole, parts = trainer(corpus), trainer(corpus, replace(RUN, accumulate=4))
    for run in (whole, parts):
        run.train(4, progress=False)
    assert parts.losses == pytest.approx(whole.losses, abs=1e-5) and parts.losses != whole.losses
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_an_overflowing_float16_gradient_is_skipped_and_the_scale_halved(corpus: Corpus):
    run = trainer(corpus, replace(RUN, autocast=torch.float16))
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    before = [p.clone() for p in run.model.parameters()]
    run.step()
    assert run.skipped == 1 and run.scaler.get_scale() == 2.0**21
    assert all(entry["step"] == 0 for entry in run.optimizer.state.values())  # AdamW in one launch has made them
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    run.train(progress=False)
    assert 1 <= run.skipped < run.steps_done == 12 and run.losses[-1] < run.losses[0]
    fresh = trainer(corpus, run.config)
    fresh.load_state_dict(through_a_file(run.state_dict()))
    assert fresh.skipped == run.skipped and fresh.scaler.get_scale() == run.scaler.get_scale()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from inside torch
def test_a_compiled_run_learns_as_the_eager_one(corpus: Corpus):
    torch._dynamo.reset()
    eager, compiled = trainer(corpus), trainer(corpus, replace(RUN, compile=True, steps=12))
    for run in (eager, compiled):
        run.train(3, progress=False)
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-4)
    assert [*compiled.state_dict()["model"]] == [*eager.state_dict()["model"]]  # no names of the wrapper


def test_a_truncated_checkpoint_is_refused_and_nothing_changes(corpus: Corpus, tmp_path: Path):
    run = trainer(corpus)
    run.train(2, progress=False)
    run.save(tmp_path / "run.tqk")
    content = (tmp_path / "run.tqk").read_bytes()
    for kept in (0, 10, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.tqk").write_bytes(content[:kept])
        with pytest.raises(ValueError, match=f"no whole checkpoint .{kept} bytes"):
            run.load(tmp_path / "cut.tqk")
    assert run.steps_done == 2
    run.load(tmp_path / "run.tqk")

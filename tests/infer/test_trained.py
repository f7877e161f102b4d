"""The small model that the book trains: made, ended, gone on with, read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tq.infer import pretrained, trained
from tq.train.model import GPTConfig, Trainer, load

pytest.importorskip("tokenizers", reason="needs tokenizers")


class Ended(Exception):
    pass


def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPTConfig(layers=1, hidden=64, heads=1, vocab=300, seq=32, ffn=64, activation="swiglu")
    monkeypatch.setattr(trained, "CONFIG", config)
    monkeypatch.setattr(trained, "_BETWEEN", 2)
    monkeypatch.setattr(trained, "load_corpus", lambda *given: load(*given, max_bytes=100_000, cache=tmp_path))

    def end(trainer: Trainer) -> None:
        if trainer.steps_done == 5:
            raise Ended

    broken, whole = tmp_path / "broken.safetensors", tmp_path / "whole.safetensors"
    with pytest.raises(Ended):
        trained.train(broken, 8, end)
    assert broken.with_suffix(".unfinished").is_file() and not broken.exists()
    steps: list[int] = []
    told = trained.train(broken, 8, lambda trainer: steps.append(trainer.steps_done))
    assert steps == [5, 6, 7, 8] and not broken.with_suffix(".unfinished").exists()
    trained.train(whole, 8)
    one, other = pretrained.load(broken), pretrained.load(whole)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert one.training == told and told["tokens"] == 8 * trained.BATCH * 32 and one.name == "book-3m"
    assert one.decode(one.encode("def f(x):")) == "def f(x):"
    assert one.model.head.weight is one.model.embed.weight


def test_files_of_another_kind(tmp_path: Path) -> None:
    from safetensors.torch import save

    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"x": torch.ones(3)}))
    with pytest.raises(ValueError, match="holds no model with its tokenizer"):
        pretrained.load(path)
    path.write_bytes(save({"x": torch.ones(3)}, {"model": "{}", "tokenizer": "{}"}))
    with pytest.raises(ValueError, match="is damaged"):
        pretrained.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        pretrained.load(path)


def test_the_one_of_the_checkout() -> None:
    assert trained.obstacle() is None
    language = pretrained.load(trained.path())
    assert language.model.config == trained.CONFIG and language.training is not None
    assert trained.path().stat().st_size < 7e6

"""The runs at GPT-2's sizes, rehearsed with a tiny model on the same corpus and the same path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tq.train.experiments import gpt2_scale
from tq.train.experiments.paired_runs import Run, fields
from tq.train.model.corpus import bits_per_byte

LONG = Run(steps=6, batch=4, workers=2, autocast="bfloat16", max_bytes=200_000)
RULES: dict[str, dict[str, Any]] = {"published": {"variant": "published-v3"}, "4 bits": {"variant": "gradient"}}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CACHE", str(tmp_path))


def test_the_corpus_is_capped_repeats_and_holds_pytorch_too() -> None:
    pytest.importorskip("tokenizers")
    corpus, again = (gpt2_scale.python_sources(512, 400_000) for _ in range(2))
    assert corpus.sha256 == again.sha256 and corpus.vocab == 512
    assert 300_000 < corpus.train_bytes + corpus.valid_bytes <= 400_000
    assert 0.03 < corpus.valid_bytes / corpus.train_bytes < 0.08
    assert 1.5 < corpus.bytes_per_token < 4
    text = corpus.decode(corpus.train)
    assert "import torch" in text and "import sys" in text


def test_a_unigram_model_is_worse_than_its_tokens_are_long() -> None:
    pytest.importorskip("tokenizers")
    corpus = gpt2_scale.python_sources(256, 200_000)  # no merges: tokens are bytes
    counts = torch.bincount(corpus.train.long()).double()
    share = counts[counts > 0] / counts.sum()
    assert gpt2_scale.unigram_bits_per_byte(corpus) == pytest.approx(-(share * share.log2()).sum().item())
    assert 4 < gpt2_scale.unigram_bits_per_byte(corpus) < 6


def test_runs_share_the_start_and_tell_their_loss_in_bits_a_byte() -> None:
    pytest.importorskip("tokenizers")
    plain = replace(LONG, preset="tiny", lr=4e-3)
    runs = {"fp32": plain} | {name: replace(plain, warmup=1, **what) for name, what in RULES.items()}
    found = {name: gpt2_scale.train(fields(run) | {"vocab": 256}) for name, run in runs.items()}
    plain = found["fp32"]
    for name, outcome in found.items():
        assert len(outcome["losses"]) == 6 and outcome["step_s"] > 0
        assert torch.equal(outcome["losses"][:2], plain["losses"][:2])  # one shared step: the second loss is before any
        assert (outcome["losses"][3:] != plain["losses"][3:]).any() == (name != "fp32")
        assert (outcome["drift"] > 0) == (name == "published")
        assert outcome["corpus"] == plain["corpus"] and outcome["corpus_bytes"] <= 200_000
    corpus = gpt2_scale.python_sources(256, LONG.max_bytes)
    assert plain["bits_per_byte"] == bits_per_byte(plain["valid"], corpus)
    assert plain["unigram"] == gpt2_scale.unigram_bits_per_byte(corpus)

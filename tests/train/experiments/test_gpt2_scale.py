"""The runs at GPT-2's sizes, rehearsed with a tiny model on the same corpus and the same path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tq.train.experiments import gpt2_scale
from tq.train.experiments.paired_runs import Run, fields
from tq.train.model.corpus import bits_per_byte

LONG = Run(steps=6, batch=4, workers=2, autocast="bfloat16", max_bytes=200_000)
OTHERS = {"published": {"variant": "published-v3"}, "2 bits": {"bits": (2, 2)}}


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


def test_a_campaign_has_pairs_in_the_order_of_the_seeds_and_the_others_once() -> None:
    runs = gpt2_scale.campaign(replace(LONG, seed=3), {"tiny": (4e-3, 2), "1m": (2e-3, 1)}, OTHERS)
    assert list(runs)[:4] == [("tiny", "fp32", 3), ("tiny", "4 bits", 3), ("tiny", "fp32", 4), ("tiny", "4 bits", 4)]
    assert [key for key in runs if key[0] == "1m"] == [("1m", "fp32", 3), ("1m", "4 bits", 3)]
    assert [key[1] for key in runs if key[1] in OTHERS] == ["published", "2 bits"]
    plain, coded, two = (runs["tiny", rule, 3] for rule in ("fp32", "4 bits", "2 bits"))
    assert coded == replace(plain, variant="gradient", warmup=1) and two == replace(coded, bits=(2, 2))
    assert runs["1m", "4 bits", 3].lr == 2e-3 and not gpt2_scale.campaign(LONG, {}, OTHERS)


def test_runs_share_the_start_and_tell_their_loss_in_bits_a_byte() -> None:
    pytest.importorskip("tokenizers")
    runs = gpt2_scale.campaign(LONG, {"tiny": (4e-3, 1)}, OTHERS)
    found = {key[1]: gpt2_scale.train(fields(run) | {"vocab": 256}) for key, run in runs.items()}
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

"""Quantization while training, and after, on few steps of the book's model; and tokens that are timed."""

from __future__ import annotations

import pytest
import torch

from tq.infer import trained
from tq.infer.decoder import Decoder
from tq.lab import decoding, in_the_loop, weight_study
from tq.train.model import GPT, load

pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("numba", reason="needs numba")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts of 64 tokens, calibrated on 2,048, and a corpus that is read in no time."""
    monkeypatch.setitem(weight_study.MODELS, "book", (trained.path, 2, 64))
    monkeypatch.setattr(weight_study, "TOKENS", 2048)
    monkeypatch.setattr(in_the_loop, "load", lambda *given: load("stdlib", "bytes", max_bytes=200_000))
    weight_study.of.cache_clear()


def test_gradients_go_through_the_rounding() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rounded = in_the_loop.Rounded(weight_study.codec(2))(weight)
    assert not torch.equal(rounded, weight)
    rounded.square().sum().backward()
    assert weight.grad is not None and torch.allclose(weight.grad, 2 * rounded)


def test_all_arms_are_trained_alike() -> None:
    model = weight_study.language("book").model
    exact, loop = (in_the_loop.trained_on(model, 2, one, 5) for one in (None, weight_study.codec(2)))
    assert isinstance(loop, GPT) and list(exact.state_dict()) == list(loop.state_dict()) == list(model.state_dict())
    moved = [not torch.equal(a, b) for a, b in zip(exact.parameters(), loop.parameters(), strict=True)]
    assert all(moved)
    found = in_the_loop.compare(2, 1)
    assert set(found) == {"exact", "rounded afterwards", "in the loop", "ours afterwards"}
    assert all(sum(found["exact"]["kl"]) < sum(found[name]["kl"]) for name in found if name != "exact")


def test_tokens_are_timed() -> None:
    decoder = Decoder(decoding.quantized("book", 4), 64)
    found = decoding.rounds({"4 bits": decoder}, weight_study.language("book"), 2, beside=False)
    assert set(found) == {"4 bits"} and 0 < len(found["4 bits"]) <= 2 * decoding.TOKENS


def test_tokens_as_a_task() -> None:
    found = decoding.task({"name": "book", "bits": [3], "rounds": 1, "repeats": 2, "beside": False})
    parts = found["parts"]["3 bits"]  # blocks of two widths, and a head of 4 bits
    assert len(parts) == 3 and all(len(each) == 2 for each in parts)
    assert set(found["seconds"]) == set(found["nbytes"]) == {"3 bits", "3 bits, paths", "3 bits, paths, mixed"}
    alike = found["nbytes"]["3 bits"]
    assert found["nbytes"]["3 bits, paths"] == alike  # mixed ones have a sixty-fourth more bits than three, or less
    assert 0.98 * alike < found["nbytes"]["3 bits, paths, mixed"] < 1.02 * alike
    assert min(map(len, found["seconds"].values())) > 0

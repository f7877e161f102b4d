"""Prompts with a pass key: where it is, and how a model that knows the answer is judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.infer.helpers import sharp
from tq.lab import needle as lab
from tq.train.model import GPTConfig

BYTES: Any = SimpleNamespace(encode=lambda text: torch.tensor(list(text.encode())))


def test_the_key_lies_where_it_was_asked_for() -> None:
    for depth in (0.1, 0.5, 0.9):
        one = lab.needle(BYTES, 2000, depth, seed=3)
        text = bytes(one.ids.tolist()).decode()
        key = text[-5:]
        assert one.answer == 5 and 1800 < len(one.ids) <= 2000 and text.count(key) == 3
        assert abs(text.index(key) / len(text) - depth) < 0.1
    assert key != bytes(lab.needle(BYTES, 2000, 0.9, seed=4).ids[-5:].tolist()).decode()
    with pytest.raises(ValueError, match="leave no room"):
        lab.needle(BYTES, 100, 0.5, 0)


def test_logits_of_the_last_places() -> None:
    model = sharp(GPTConfig(layers=2, hidden=64, heads=1, vocab=256, seq=64), 3)
    ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(lab.last_logits(model, ids, 5), model(ids[None])[0][0, -5:], atol=1e-4)
    one = lab.Needle(ids, 5, 40, 0.5)
    hit, likely = lab.found(model, one)
    assert not hit and likely < 0
    with torch.no_grad():
        ids[-1] = model(ids[None])[0][0, -2].argmax()
    assert lab.found(model, lab.Needle(ids, 1, 40, 0.5))[0]


def test_paired_test() -> None:
    assert lab.sign_test([True] * 10, [True] * 10) == 1
    assert lab.sign_test([True] * 8 + [False] * 2, [False] * 8 + [False] * 2) == pytest.approx(2 / 256)


def test_rows() -> None:
    needles = lab.grid(BYTES, (700, 1500), (0.2, 0.8))
    found = {"exact": [(True, -0.1)] * 4, "coded": [(True, -0.2), (False, -3.0)] * 2}
    told = lab.rows(found, needles)
    assert told[1] == {"method": "coded", "found": 2, "of": 4, "700 tokens": "1/2", "1,500 tokens": "1/2"}

"""A cache of codes under ``transformers``' own generation, beside its plain cache."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from tests.infer.helpers import sharp
from tq import Codec
from tq.infer.kv import bytes_per_token, calibrate
from tq.infer.llama import to_llama
from tq.train.model import GPT, GPTConfig

pytest.importorskip("transformers", reason="needs transformers")
from transformers.cache_utils import DynamicCache  # noqa: E402

from tq.infer.cache import CodedLayer, coded_cache  # noqa: E402
from tq.infer.pages import PAGE  # noqa: E402

CONFIG = GPTConfig(layers=2, hidden=128, heads=2, vocab=101, seq=700, kv_heads=1, activation="swiglu")


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return sharp(CONFIG, 3)


@pytest.fixture(scope="module")
def model(gpt: GPT) -> Any:
    return to_llama(gpt)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(101, (rows, length), generator=torch.Generator().manual_seed(0))


def test_the_llama_is_the_gpt(gpt: GPT, model: Any) -> None:
    with torch.no_grad():
        assert torch.allclose(model(ids(2, 50)).logits, gpt(ids(2, 50))[0], atol=2e-5)
    with pytest.raises(ValueError, match="swiglu"):
        to_llama(GPT(GPTConfig(layers=1, hidden=16, heads=2, vocab=8, seq=8)))


def generated(model: Any, cache: Any, rows: int = 2, prompt: int = 30, **more: Any) -> torch.Tensor:
    return model.generate(
        ids(rows, prompt), attention_mask=torch.ones(rows, prompt, dtype=torch.int64), cache=cache,
        do_sample=False, pad_token_id=0, **more,
    )  # fmt: skip


@pytest.mark.parametrize("more", ({"max_new_tokens": 60}, {"max_new_tokens": 30, "num_beams": 3}))
def test_without_codecs_it_is_the_plain_cache(model: Any, more: dict[str, Any]) -> None:
    plain = generated(model, DynamicCache(), **more)
    assert torch.equal(generated(model, coded_cache(2, None, None), **more), plain)


def test_eight_bits_generate_the_same_tokens_nearly(gpt: GPT, model: Any) -> None:
    plain = generated(model, DynamicCache(), max_new_tokens=40)
    found = generated(model, coded_cache(2, Codec(8), Codec(8), calibrate(gpt, ids(4, 100))), max_new_tokens=40)
    assert (found == plain).float().mean() > 0.9


def prints(cache: Any) -> list[str]:
    return [
        hashlib.sha256(part[:, :, :PAGE].contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for layer in cache.layers for pages in layer.coded for part in pages._pages[0]
    ]  # fmt: skip


def test_no_code_ever_changes(model: Any) -> None:
    cache = coded_cache(2, Codec(4, block=64), Codec(3, block=64))
    generated(model, cache, prompt=PAGE, max_new_tokens=2)
    before = prints(cache)
    with torch.no_grad():
        for token in range(300):
            model(torch.full((2, 1), token % 101), cache=cache)
    assert prints(cache) == before and cache.get_seq_length() == PAGE + 1 + 300


def test_memory_is_what_the_formula_says(gpt: GPT, model: Any) -> None:
    keys, values = Codec(4, block=64, scale_dtype=torch.bfloat16), Codec(3, block=64, scale_dtype=torch.bfloat16)
    cache = coded_cache(2, keys, values)
    with torch.no_grad():
        model(ids(1, 1 + 2 * PAGE), cache=cache)
    first = bytes_per_token(gpt, None, None, plain_bytes=4)  # in the model's own numbers
    held = sum(layer.nbytes for layer in cache.layers) - first
    assert held == 2 * PAGE * bytes_per_token(gpt, keys, values) == 2 * PAGE * 2 * (34 + 26)


def test_tokens_are_taken_back(model: Any) -> None:
    cache, other = (coded_cache(2, Codec(4, block=64), Codec(4, block=64)) for _ in range(2))
    with torch.no_grad():
        model(ids(2, 300), cache=cache)
        cache.crop(-44)
        assert cache.get_seq_length() == 256 and len(cache.layers[0].coded[0]._pages) == 1
        again = model(ids(2, 300)[:, 256:], cache=cache).logits
        model(ids(2, 300)[:, :256], cache=other)
        straight = model(ids(2, 300)[:, 256:], cache=other).logits
    assert (again - straight).abs().mean() < 0.1 * straight.abs().mean(), "but for the mean of other first tokens"
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="negative"):
        CodedLayer(None, None).crop(3)


def test_rows_are_repeated_and_chosen(model: Any) -> None:
    cache = coded_cache(2, Codec(4, block=64), None)
    with torch.no_grad():
        model(ids(3, 40), cache=cache)
    before = [pages.decoded() for pages in cache.layers[0].coded]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0]))
    for pages, x in zip(cache.layers[0].coded, before, strict=True):
        assert torch.equal(pages.decoded(), x[[2, 0]])
    with pytest.raises(ValueError, match="statistics of 1 layers for a model of 2"):
        coded_cache(2, None, None, [None])  # type: ignore[list-item]

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

from tq.infer.cache import CodedLayer, attention, coded_cache  # noqa: E402
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


@pytest.fixture
def coded_model(model: Any):
    model.set_attn_implementation("coded")
    yield model
    model.set_attn_implementation("sdpa")


def pair(gpt: GPT, **more: Any) -> tuple[Any, Any]:
    """A cache whose codes are decoded, and one whose codes are read."""
    codecs = [Codec(bits, block=64, scale_dtype=torch.bfloat16) for bits in (4, 3)]
    known = calibrate(gpt, ids(4, 100))
    return coded_cache(2, *codecs, known, **more), coded_cache(2, *codecs, known, direct=True, **more)


def test_attention_straight_from_codes_is_that_to_decoded_ones(
    gpt: GPT, coded_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, direct = pair(gpt)
    with torch.no_grad():
        for cache in (decoded, direct):
            coded_model(ids(1, 300), cache=cache)
        monkeypatch.setattr(direct.layers[0].coded[0], "decoded", None)  # is not called any more
        for token in range(20):
            wanted, found = (coded_model(torch.tensor([[token]]), cache=cache).logits for cache in (decoded, direct))
            assert torch.allclose(found, wanted, atol=2e-4)


def test_generation_straight_from_codes(gpt: GPT, coded_model: Any) -> None:
    decoded, direct = pair(gpt)
    wanted = generated(coded_model, decoded, rows=1, prompt=280, max_new_tokens=60)
    assert torch.equal(generated(coded_model, direct, rows=1, prompt=280, max_new_tokens=60), wanted)
    # what cannot be read is decoded: batches, beams, several tokens that are tried at once and taken back
    for more in ({"rows": 2}, {"rows": 1, "num_beams": 3}, {"rows": 1, "prompt": 250, "prompt_lookup_num_tokens": 3}):
        decoded, direct = pair(gpt)
        wanted = generated(coded_model, decoded, max_new_tokens=20, **more)
        assert torch.equal(generated(coded_model, direct, max_new_tokens=20, **more), wanted)


def test_masked_tokens_are_masked_in_codes_too(gpt: GPT, coded_model: Any) -> None:
    mask, found = torch.ones(1, 40, dtype=torch.int64), []
    mask[:, :15] = 0
    for cache in pair(gpt):
        found.append(coded_model.generate(
            ids(1, 40), attention_mask=mask, cache=cache, do_sample=False, pad_token_id=0, max_new_tokens=20
        ))  # fmt: skip
    assert torch.equal(*found)


def test_another_attention_cannot_take_codes_for_numbers(gpt: GPT, model: Any) -> None:
    _, direct = pair(gpt)
    with torch.no_grad():
        model(ids(1, 30), cache=direct)
        with pytest.raises(TypeError, match="set_attn_implementation"):
            model(ids(1, 1), cache=direct)


OTHERS = (Codec(8, block=64), Codec(4, block=128), Codec(4, block=64, codebook="sphere"), None)


@pytest.mark.parametrize("codec", OTHERS)
def test_codes_that_no_kernel_reads_are_decoded(codec: Codec | None, coded_model: Any) -> None:
    found = [
        generated(coded_model, coded_cache(2, codec, Codec(4, block=64), direct=direct), rows=1, max_new_tokens=10)
        for direct in (False, True)
    ]
    assert torch.equal(*found)


def test_a_cache_is_filled_anew_after_a_reset(gpt: GPT, coded_model: Any) -> None:
    for cache in pair(gpt, sinks=2):
        found = []
        with torch.inference_mode():
            coded_model(ids(2, 40), cache=cache)
        cache.crop(-50)
        assert cache.get_seq_length() == 0
        for rows in (1, 1):
            cache.reset()
            found.append(generated(coded_model, cache, rows=rows, max_new_tokens=10))
        assert torch.equal(*found)


def test_a_prompt_in_inference_mode_goes_on_outside_of_it(gpt: GPT, coded_model: Any) -> None:
    decoded, direct = pair(gpt)
    found = []
    for cache in (decoded, direct):
        with torch.inference_mode():
            coded_model(ids(1, 30), cache=cache)
            cache.batch_select_indices(torch.tensor([0]))
        with torch.no_grad():
            found.append(coded_model(ids(1, 1), cache=cache).logits)
    assert torch.allclose(*found, atol=2e-4)


def test_what_a_model_adds_to_attention_is_not_left_out() -> None:
    x = torch.randn(1, 2, 1, 64)
    with pytest.raises(ValueError, match="knows no .*s_aux"):
        attention(torch.nn.Module(), x, x, x, None, s_aux=torch.zeros(2))

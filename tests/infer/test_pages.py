"""Attention straight from codes, beside attention to what they decode to."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tq import Codec
from tq.infer.kv import Coder

numba = pytest.importorskip("numba", reason="needs numba")
from tq.infer.pages import PAGE, Pages, attend  # noqa: E402
from tq.kernels import attention, cpu  # noqa: E402


def filled(coder: Coder | None, x_BKTD: Tensor, at_once: int = 100) -> Pages:
    pages = Pages(coder)
    for part in x_BKTD.split(at_once, 2):
        pages.append(part)
    return pages


def some(
    bits: tuple[int, int], heads: int, tokens: int, size: int, dtype: torch.dtype, sinks: int = 0
) -> tuple[Pages, Pages]:
    generator = torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(1, heads, tokens, size, generator=generator) for _ in range(2))
    mean, factor = torch.randn(heads, size, generator=generator), torch.rand(heads, size, generator=generator) + 0.5
    codecs = [Codec(b, size, "mse", seed=7 + b, scale_dtype=dtype) for b in bits]
    key, value = Coder(codecs[0], mean, factor, sinks=sinks), Coder(codecs[1], sinks=sinks)
    return filled(key, k + mean[:, None]), filled(value, v)


@pytest.mark.parametrize("bits", ((4, 4), (4, 3), (3, 2), (2, 2)))
@pytest.mark.parametrize(("queries", "heads", "tokens", "size"), [
    (3, 3, 700, 64), (9, 3, 1, 64), (10, 2, 513, 128), (4, 2, 300, 64), (8, 2, 300, 64), (8, 2, 300, 256),
])  # fmt: skip
def test_it_is_attention_to_decoded_keys(
    bits: tuple[int, int], queries: int, heads: int, tokens: int, size: int
) -> None:
    keys, values = some(bits, heads, tokens, size, torch.bfloat16)
    q = torch.randn(queries, size, generator=torch.Generator().manual_seed(1))
    wanted = F.scaled_dot_product_attention(q[None, :, None], keys.decoded(), values.decoded(), enable_gqa=True)
    found = attend(q, keys, values)
    assert torch.allclose(found, wanted[0, :, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("queries", "tokens", "sinks"), [(2, 700, 1), (8, 257, 4), (2, 3, 3), (2, 2, 4), (2, 99, 130)])
def test_attention_with_first_tokens_that_are_exact(queries: int, tokens: int, sinks: int) -> None:
    keys, values = some((4, 3), 2, tokens, 64, torch.bfloat16, sinks)
    generator = torch.Generator().manual_seed(tokens)
    k = torch.randn(1, 2, tokens, 64, generator=generator)
    offset = keys.decoded()[:, :, :sinks] - k[:, :, :sinks]
    assert torch.allclose(offset, offset[:, :, :1].expand_as(offset), atol=1e-5), "exact but for the mean"
    for scale in (0.1, 3.0):  # with much and with little attention to them
        q = scale * torch.randn(queries, 64, generator=generator)
        wanted = F.scaled_dot_product_attention(q[None, :, None], keys.decoded(), values.decoded(), enable_gqa=True)
        assert torch.allclose(attend(q, keys, values), wanted[0, :, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("queries", "tokens", "sinks"), [(2, 700, 1), (6, 300, 0), (2, 1, 1)])
def test_attention_after_a_matrix(queries: int, tokens: int, sinks: int) -> None:
    """Of keys and of values, which have a mean as well."""
    generator = torch.Generator().manual_seed(tokens)
    made = []
    for number in range(2):
        mean = torch.randn(2, 64, generator=generator)
        matrix = torch.eye(64) + 0.1 * torch.randn(2, 64, 64, generator=generator)
        coder = Coder(Codec(4, 64, "mse", seed=number), mean, sinks=sinks, matrix_KDD=matrix)
        made.append(filled(coder, torch.randn(1, 2, tokens, 64, generator=generator)))
    keys, values = made
    q = torch.randn(queries, 64, generator=generator)
    wanted = F.scaled_dot_product_attention(q[None, :, None], keys.decoded(), values.decoded(), enable_gqa=True)
    assert torch.allclose(attend(q, keys, values), wanted[0, :, 0], rtol=1e-4, atol=2e-4)
    keys.to("cpu")
    assert keys.coder is not None and keys.coder.inverse_KDD is not None


def test_first_tokens_are_forgotten_and_come_again() -> None:
    keys, values = some((4, 4), 2, 600, 64, torch.bfloat16, 4)
    before = keys.decoded()
    assert keys.counts() == [PAGE, PAGE, 600 - 2 * PAGE - 4]
    keys.crop(PAGE + 4)
    assert keys.counts() == [PAGE] and torch.equal(keys.decoded(), before[:, :, : PAGE + 4])
    keys.crop(2)
    assert (keys.sinks, keys.counts()) == (2, []) and torch.equal(keys.decoded(), before[:, :, :2])
    keys.append(before[:, :, 2:600])
    assert keys.length == 600 and torch.equal(keys.decoded()[:, :, :4], before[:, :, :4])
    keys.select(torch.tensor([0, 0, 0]))
    assert keys.shape == (3, 2) and keys.decoded().shape == (3, 2, 600, 64)
    with pytest.raises(ValueError, match="keys keep 4 of 600 tokens exact, values 3 of 3"):
        values.crop(3)
        attend(torch.randn(2, 64), keys, values)


@pytest.fixture
def threads():
    """Sets the number of threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize(("queries", "heads", "tokens"), [(8, 8, 5000), (4, 1, 30 * PAGE), (6, 3, 40 * PAGE + 17)])
def test_pages_that_threads_join_in_parts(queries: int, heads: int, tokens: int, sinks: int, threads) -> None:
    """Several pages of a head in one piece of a thread's work, several pieces of a head, heads that share a piece."""
    keys, values = some((4, 4), heads, tokens, 64, torch.bfloat16, sinks)
    q = 2 * torch.randn(queries, 64, generator=torch.Generator().manual_seed(2))
    wanted = F.scaled_dot_product_attention(q[None, :, None], keys.decoded(), values.decoded(), enable_gqa=True)
    for count in (1, 2, 3):
        threads(count)
        assert torch.allclose(attend(q, keys, values), wanted[0, :, 0], rtol=1e-4, atol=1e-4), count


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("sinks", [0, 1])
def test_a_key_that_is_no_number_is_not_hidden(sinks: int, count: int, threads) -> None:
    coder = Coder(Codec(4, 64, "mse", scale_dtype=torch.bfloat16, nonfinite="propagate"), sinks=sinks)
    x = torch.randn(1, 2, 40 * PAGE + 1 + sinks, 64)
    keys, values = filled(coder, x.index_fill(2, torch.tensor([x.shape[2] - 1]), math.nan)), filled(coder, x)
    threads(count)
    assert attend(torch.randn(2, 64), keys, values).isnan().all()


@pytest.mark.parametrize("scale", [0.0, 1e3, 1e15])
def test_scores_that_are_equal_or_very_large(scale: float) -> None:
    keys, values = some((4, 4), 2, 600, 64, torch.bfloat16, 1)
    q = scale * torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(attend(q, keys, values), _wanted(q, keys, values), rtol=1e-4, atol=1e-4)


def test_a_cache_with_other_values_is_another_one() -> None:
    keys, values = some((4, 4), 2, 600, 64, torch.bfloat16)
    q = torch.randn(2, 64)
    first = attend(q, keys, values)
    others = filled(values.coder, torch.randn(1, 2, 600, 64))
    assert torch.allclose(attend(q, keys, others), _wanted(q, keys, others), rtol=1e-4, atol=1e-4)
    assert values.coder is not None
    values.coder = dataclasses.replace(values.coder, mean_KD=torch.ones(1, 64))  # of all heads
    assert torch.allclose(attend(q, keys, values), first + 1, atol=1e-5)


def test_numbers_after_the_last_token_of_a_page_do_not_count() -> None:
    keys, values = some((4, 4), 2, PAGE + 5, 64, torch.bfloat16)
    q = torch.randn(2, 64)
    first = attend(q, keys, values)
    for pages in (keys, values):
        payload, scales = pages._pages[-1]
        payload[:, :, 5:], scales[:, :, 5:] = 255, math.nan
    assert torch.equal(attend(q, keys, values), first)


@pytest.mark.parametrize("queries", [2, 4, 6, 8])
def test_scales_in_fp32(queries: int) -> None:
    keys, values = some((4, 4), 2, 300, 64, torch.float32)
    q = torch.randn(queries, 64, generator=torch.Generator().manual_seed(1))
    wanted = F.scaled_dot_product_attention(q[None, :, None], keys.decoded(), values.decoded(), enable_gqa=True)
    assert torch.allclose(attend(q, keys, values), wanted[0, :, 0], rtol=1e-4, atol=1e-4)


def test_pages_forget_and_are_chosen() -> None:
    keys, _ = some((4, 4), 2, 600, 64, torch.bfloat16)
    before = keys.decoded()
    keys.crop(PAGE + 1)
    assert torch.equal(keys.decoded(), before[:, :, : PAGE + 1]) and keys.counts() == [PAGE, 1]
    keys.select(torch.tensor([0, 0]))
    assert keys.decoded().shape == (2, 2, PAGE + 1, 64)
    assert keys.nbytes == 2 * 2 * 2 * PAGE * (32 + 2)


def _wanted(q: torch.Tensor, keys: Pages, values: Pages) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[None, :, None], keys.decoded(), values.decoded())[0, :, 0]


def test_attention_follows_what_becomes_of_the_pages() -> None:
    keys, values = some((4, 4), 2, 600, 64, torch.bfloat16)
    q, more = torch.randn(2, 64), torch.randn(1, 2, 300, 64)
    attend(q, keys, values)
    for change in (
        lambda pages: pages.crop(PAGE + 100), lambda pages: pages.append(more), lambda pages: pages.crop(40),
        lambda pages: pages.append(more[:, :, :10]), lambda pages: pages.select(torch.tensor([0])),
        lambda pages: pages.append(more), lambda pages: pages.to("cpu"),
    ):  # fmt: skip
        for pages in (keys, values):
            change(pages)
        assert torch.allclose(attend(q, keys, values), _wanted(q, keys, values), rtol=1e-4, atol=1e-4)
    keys, values = pickle.loads(pickle.dumps((keys, values)))
    for pages in (keys, values):
        pages.append(more[:, :, :1])
    assert torch.allclose(attend(q, keys, values), _wanted(q, keys, values), rtol=1e-4, atol=1e-4)


def test_attention_follows_what_becomes_of_exact_tokens() -> None:
    keys, values = some((4, 4), 2, 2, 64, torch.bfloat16, 4)
    q, more = torch.randn(2, 64), torch.randn(1, 2, 300, 64)
    for change in (
        lambda pages: None, lambda pages: pages.append(more[:, :, :1]), lambda pages: pages.crop(2),
        lambda pages: pages.append(more), lambda pages: pages.crop(298), lambda pages: pages.crop(3),
        lambda pages: pages.append(more[:, :, :50]),
    ):  # fmt: skip
        for pages in (keys, values):
            change(pages)
        assert torch.allclose(attend(q, keys, values), _wanted(q, keys, values), rtol=1e-4, atol=1e-4)


def test_pages_of_an_inference_mode_are_written_to_outside_of_it() -> None:
    x = torch.randn(1, 2, 20, 64)
    pages = Pages(Coder(Codec(4, 64)))
    with torch.inference_mode():
        pages.append(x[:, :, :10])
    pages.append(x[:, :, 10:])
    assert torch.equal(pages.decoded(), filled(Coder(Codec(4, 64)), x).decoded())
    pages.crop(-3)
    assert pages.length == 0 and pages.shape == (1, 2)


def test_attention_is_in_fp32_whatever_surrounds_it() -> None:
    generator = torch.Generator().manual_seed(5)
    coder = Coder(Codec(4, 64, "mse"), sinks=1, matrix_KDD=torch.eye(64) + 0.1 * torch.randn(2, 64, 64))
    keys, values = (filled(coder, torch.randn(1, 2, 300, 64, generator=generator)) for _ in range(2))
    q = torch.randn(4, 64)

    def anew() -> Tensor:
        keys.to("cpu")  # so that matrices are multiplied again
        return attend(q, keys, values)

    plain, before = anew(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(anew(), plain, atol=1e-6) and plain.dtype == torch.float32
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_default_dtype(torch.float32)


def test_caches_that_it_cannot_read() -> None:
    keys, values = some((4, 4), 2, 10, 64, torch.bfloat16)
    q = torch.randn(2, 64)
    with pytest.raises(ValueError, match="must be coded"):
        attend(q, filled(None, torch.randn(1, 2, 10, 64)), values)
    wide = filled(Coder(Codec(4, 128, scale_dtype=torch.bfloat16)), torch.randn(1, 2, 10, 64))
    with pytest.raises(ValueError, match="blocks must be the heads' size 64"):
        attend(q, wide, values)
    sphere = filled(Coder(Codec(4, 64, codebook="sphere", scale_dtype=torch.bfloat16)), torch.randn(1, 2, 10, 64))
    with pytest.raises(ValueError, match="the Gaussian codebook"):
        attend(q, sphere, values)
    three = filled(values.coder, torch.randn(1, 3, 10, 64))
    with pytest.raises(ValueError, match="must have as many heads, of 64"):
        attend(q, keys, three)
    with pytest.raises(TypeError, match="work on memory"):
        attend(q.to("meta"), keys, values, impl="cpu")
    for pages in (keys, values):
        pages.crop(0)
    with pytest.raises(ValueError, match="at least one token"):
        attend(q, keys, values)
    keys, values = some((4, 4), 2, 10, 64, torch.bfloat16)
    keys.select(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="known is one sequence"):
        attend(q, keys, values)


@numba.njit
def _softened(scores: np.ndarray, factor: np.float32) -> np.ndarray:
    stats = np.empty(2, np.float32)
    attention.soften(cpu._address(scores), scores.size, factor, cpu._address(stats))
    return stats


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_shares_are_exponentials_to_the_last_places(spread: float) -> None:
    scores = (spread * np.random.default_rng(0).standard_normal(4096)).astype(np.float32)
    scores[:2] = -np.inf, scores.max()
    products = scores * np.float32(0.125)
    wanted = np.exp((products - products.max()).astype(np.float64))  # of differences as fp32 has them
    found = scores.copy()
    largest, total = _softened(found, np.float32(0.125))
    assert largest == products.max()
    assert np.abs(found - wanted).max() < 2e-7
    counts = wanted > 1e-30
    assert (np.abs(found - wanted)[counts] / wanted[counts]).max() < 4e-7
    assert found[0] < 1e-37
    assert found[1] == 1
    assert total == pytest.approx(wanted.sum(), rel=1e-6)


def test_a_score_that_is_no_number_is_not_hidden() -> None:
    scores = np.linspace(-3, 3, 32, dtype=np.float32)
    scores[17] = np.nan
    largest, total = _softened(scores, np.float32(1))
    assert largest == 3
    assert np.isnan(total)
    assert np.isnan(scores).sum() == 1

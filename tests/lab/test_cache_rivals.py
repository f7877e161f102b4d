"""Other codes of keys and values: what they store, and that they do what their papers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.infer.helpers import sharp
from tq import Codec
from tq.infer.evaluate import divergence
from tq.infer.kv import Coder, calibrate, coders, cores, with_coded_attention
from tq.lab import cache_rivals as rivals
from tq.train.model import GPT, GPTConfig

MODEL = sharp(GPTConfig(layers=2, hidden=128, heads=2, vocab=101, seq=128), 4).requires_grad_(False)


def ids(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(101, (rows, 128), generator=torch.Generator().manual_seed(seed))


def test_stored_bits() -> None:
    codec = Codec(4, block=64, scale_dtype=torch.bfloat16)
    assert rivals.stored_bits(rivals.PerChannel(4), rivals.PerToken(4), 64) == (5.0 + 4.5) / 2
    assert rivals.stored_bits(Coder(codec), None, 64) == (4.25 + 16) / 2
    coarse, fine = rivals.split_codecs(2, 1, 16, 64)
    assert rivals.stored_bits(Coder(coarse, fine=fine), rivals.Fp8(), 64) == (2.25 + 2 * 16 / 64 + 8) / 2


def test_integers_keep_what_lies_on_their_grid() -> None:
    x = torch.randint(0, 16, (1, 2, 64, 32), generator=torch.Generator().manual_seed(0)).float()
    x[:, :, ::32], x[:, :, 1::32] = 0, 15  # in every group of tokens
    assert torch.equal(rivals.PerChannel(4)(x), x)
    y = x.transpose(2, 3).contiguous()
    y[..., 0], y[..., 1] = 0, 15
    assert torch.equal(rivals.PerToken(4)(y), y)
    assert torch.equal(rivals.Fp8()(y), y)
    small = 1e-4 * torch.randn(1, 2, 3, 64)
    scaled, plain = ((rivals.Fp8(way)(small) - small).norm() / small.norm() for way in (True, False))
    assert scaled < 0.04 < 0.5 < plain and rivals.Fp8(True).stored(64) == 8.25


def test_a_loud_channel_is_what_codes_per_channel_are_for() -> None:
    x = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] *= 50
    quiet = torch.arange(64) != 5
    errors = [(code(x) - x)[..., quiet].square().mean() for code in (rivals.PerChannel(4), rivals.PerToken(4))]
    assert errors[0] < 0.05 * errors[1]


def test_keys_before_rotary_positions() -> None:
    codes = rivals.before_rotary(MODEL, ids(4), 2)
    exact = divergence(MODEL, with_coded_attention(MODEL, rivals.pairs(None, None, 2)), ids(2, 1)).kl
    found = divergence(MODEL, with_coded_attention(MODEL, rivals.pairs(codes, None, 2)), ids(2, 1)).kl
    plain = [rivals.PerToken(2)] * 2
    rough = divergence(MODEL, with_coded_attention(MODEL, rivals.pairs(plain, None, 2)), ids(2, 1)).kl
    assert exact < 1e-9 < found < rough


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_levels_are_fitted_to_what_is_coded(bits: int) -> None:
    seen: list[torch.Tensor] = []
    hook = cores(MODEL)[0].register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    MODEL(ids(2, 1))
    hook.remove()
    fitted = rivals.before_rotary(MODEL, ids(4), bits)[0]
    spread = torch.linspace(-3, 3, 2**bits)  # of all numbers, outliers too, evenly
    errors = [float((code(seen[0]) - seen[0]).square().mean()) for code in (fitted, replace(fitted, levels_L=spread))]
    assert errors[0] < 0.95 * errors[1]


def test_channels_with_more_bits() -> None:
    known = calibrate(MODEL, ids(8))
    coarse, fine = rivals.split_codecs(2, 2, 16, 64, search=5)
    found = []
    for keys, apart in ((Codec(2, 64, "mse"), None), (coarse, fine)):
        made = coders(keys, None, known, balanced=True, fine=apart)
        found.append(divergence(MODEL, with_coded_attention(MODEL, made), ids(3, 1)).kl)
    assert found[1] < 0.9 * found[0]


def test_a_bias_of_keys_changes_no_exact_model_and_breaks_plain_codes() -> None:
    offset = 60 * torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    exact = [rivals.biased(None, offset)] * 2
    assert divergence(MODEL, with_coded_attention(MODEL, rivals.pairs(exact, None, 2)), ids(2, 1)).kl < 1e-6
    plain = [rivals.biased(Coder(Codec(4, 64, "mse")), offset)] * 2
    assert divergence(MODEL, with_coded_attention(MODEL, rivals.pairs(plain, None, 2)), ids(2, 1)).kl > 0.1


def test_the_paper_s_code_for_inner_products() -> None:
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    assert (rivals.Product(4)(x) - x).square().mean() < 0.06  # pi / 2 times that of one bit less
    assert rivals.Product(4).stored(64) == 5


def test_a_searched_range_is_never_further_away_and_a_clipped_one_is_used() -> None:
    k = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
    for bits in (4, 3, 2):
        plain, searched = (rivals.PerChannel(bits, 128, ranges)(k) for ranges in ((1.0,), rivals.RANGES))
        errors = [(found - k).square().view(1, 2, 2, 128, 64).sum(3) for found in (plain, searched)]
        assert (errors[1] <= errors[0]).all() and errors[1].sum() < 0.95 * errors[0].sum()


def test_levels_before_rotary_are_of_what_is_coded() -> None:
    model = GPT(GPTConfig(layers=1, hidden=128, heads=2, vocab=64, seq=64))
    ids = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 63  # one token is first in all texts, and far away
    with torch.no_grad():
        model.embed.weight[63] *= 30
    plain, without = (rivals.before_rotary(model, ids, 3, skipped)[0] for skipped in (0, 1))
    assert not torch.equal(plain.offset_KD, without.offset_KD)
    assert without.levels_L.abs().max() < 3, "outliers are not of them"

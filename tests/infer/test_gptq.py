"""GPTQ in the rotated domain: its objective, its limits, and what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tq import Codec
from tq.infer.gptq import gptq, output_error


def layer(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(weights, second moments) of a layer whose inputs are correlated, with a few large ones."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(4 * columns, columns, generator=generator) @ mixing
    x[:, ::17] *= 8
    return weight, (x.T @ x).double() / len(x)


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_output_error_is_far_below_that_of_rounding(bits: int) -> None:
    weight, moments = layer(96, 192)
    codec = Codec(bits=bits, block=64, scale_dtype=torch.bfloat16)
    plain = output_error(weight, codec.decode(codec.encode(weight, rows=True)), moments)
    ours = output_error(weight, codec.decode(gptq(weight, moments, codec)), moments)
    assert ours < 0.6 * plain


def test_without_correlation_it_is_rounding_with_a_searched_scale() -> None:
    weight, _ = layer(64, 128)
    codec = Codec(bits=4, block=64)
    identity = torch.eye(128, dtype=torch.float64)
    ours = output_error(weight, codec.decode(gptq(weight, identity, codec, search=17)), identity)
    plain = output_error(weight, codec.decode(codec.encode(weight, rows=True)), identity)
    searched = Codec(bits=4, block=64, search=17)
    best = output_error(weight, searched.decode(searched.encode(weight, rows=True)), identity)
    assert ours < plain and ours == pytest.approx(best, rel=0.02)


def test_search_and_fitted_scales_each_help() -> None:
    weight, moments = layer(96, 192)
    codec = Codec(bits=3, block=64)
    errors = [output_error(weight, codec.decode(gptq(weight, moments, codec, search=k)), moments) for k in (1, 9)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("columns", (1, 63, 65, 200))
def test_widths_that_are_no_multiple_of_a_block(columns: int) -> None:
    weight, moments = layer(8, columns)
    codec = Codec(bits=4, block=64)
    code = gptq(weight, moments, codec)
    assert code.shape == (8, columns) and code.rows
    assert output_error(weight, codec.decode(code), moments) < 0.02


def test_moments_that_a_matrix_should_not_have() -> None:
    weight, _ = layer(8, 128)
    codec = Codec(bits=4, block=64)
    nothing, one_direction, all_alike = torch.zeros(128, 128), torch.ones(128, 128), torch.eye(128)
    for seen, judged in ((nothing, all_alike), (one_direction, one_direction)):
        decoded = codec.decode(gptq(weight, seen.double(), codec))
        assert output_error(weight, decoded, judged.double()) < 0.02
    with pytest.raises(ValueError, match=r"moments must be \[128, 128\]"):
        gptq(weight, torch.eye(64), codec)
    with pytest.raises(ValueError, match="must be finite"):
        gptq(weight.where(weight < 2, torch.nan), torch.eye(128), codec)


def test_zero_rows_stay_zero() -> None:
    weight, moments = layer(8, 128)
    weight[3] = 0
    codec = Codec(bits=4, block=64)
    assert codec.decode(gptq(weight, moments, codec))[3].abs().max() < 1e-6


@pytest.mark.parametrize("other", ({"rotation": "haar"}, {"rounds": 1}))
def test_other_rotations(other: dict[str, Any]) -> None:
    weight, moments = layer(16, 128)
    plain, changed = Codec(bits=2, block=64), Codec(bits=2, block=64, **other)
    errors = [output_error(weight, codec.decode(gptq(weight, moments, codec)), moments) for codec in (plain, changed)]
    assert errors[1] < 1.15 * errors[0]

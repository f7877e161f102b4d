"""Searched rival formats: never worse than what they are searched over, and with the bits of the plain ones."""

from __future__ import annotations

import pytest
import torch

from tq.quant import formats, searched
from tq.quant.formats import nmse

PAIRS = [
    (searched.nf4(64), formats.nf4(64)), (searched.nf4(128), formats.nf4(128)),
    (searched.nf4_double_quantized(), formats.nf4_double_quantized()),
    (searched.integer(4, 64, scale_dtype=torch.bfloat16), formats.integer(4, 64, torch.bfloat16)),
    (searched.integer(8, 128), formats.integer(8, 128)),
]  # fmt: skip


def _samples(heavy: bool) -> torch.Tensor:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3))
    return x.sign() * x.abs() ** 2 if heavy else x


@pytest.mark.parametrize(("found", "plain"), PAIRS, ids=lambda f: f.name)
@pytest.mark.parametrize("heavy", [False, True])
def test_a_search_lowers_the_error_at_equal_bits(found: formats.Format, plain: formats.Format, heavy: bool) -> None:
    x = _samples(heavy)
    assert found.bits_per_element == plain.bits_per_element and found.family == plain.family
    better = nmse(x, found.roundtrip(x)) / nmse(x, plain.roundtrip(x))
    assert (0.6 if heavy else 0.75) < better < (0.99 if "8" in plain.name.split(",")[0] else 0.95)


def test_against_every_scale_of_a_fine_grid() -> None:
    x = _samples(False)[:6400]
    least = torch.full((100,), torch.inf)
    for m in torch.linspace(0.7, 1.3, 601).tolist():
        blocks = x.view(100, 64)
        unit = m * blocks / blocks.abs().amax(1, keepdim=True)
        levels = formats.nf4_levels()
        q = levels[(unit[..., None] - levels).abs().argmin(-1)]
        scale = (blocks * q).sum(1, keepdim=True) / q.square().sum(1, keepdim=True)
        least = torch.minimum(least, (blocks - scale * q).square().sum(1))
    errors = (x - searched.nf4(64, 33).roundtrip(x)).view(100, 64).square().sum(1)
    assert (errors >= 0.999 * least).all() and errors.sum() < 1.03 * least.sum()


def test_zeros_stay_and_shapes_are_kept() -> None:
    for found, _ in PAIRS:
        assert not found.roundtrip(torch.zeros(3, 100)).any()
        assert found.roundtrip(torch.ones(3, 50)).shape == (3, 50)
        assert torch.allclose(found.roundtrip(torch.ones(3, 50)), torch.ones(3, 50), atol=0.07)

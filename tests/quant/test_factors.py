"""The codec taken apart gives the codec where nothing is left out, and each factor does what its name says."""

from __future__ import annotations

import pytest
import torch

from tq import Codec
from tq.quant.factors import CHOICES, Factors, qsgd, rounded_at_random, uniform_levels
from tq.quant.formats import nmse


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("scale", CHOICES["scale"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_with_nothing_left_out_it_is_the_codec(rounds: int, scale: str, bits: int) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(bits))
    codec = Codec(bits, 128, scale, rounds=rounds, seed=7)
    found = Factors(rounds, scale=scale).roundtrip(x, bits, 128, 7)
    torch.testing.assert_close(found, codec.decode(codec.encode(x, impl="reference"), impl="reference"))


@pytest.mark.parametrize(("bits", "step"), [(1, 1.5958), (2, 0.9957), (3, 0.5860), (4, 0.3352), (5, 0.1881)])
def test_uniform_steps_are_those_of_max(bits: int, step: float) -> None:
    levels = uniform_levels(bits)  # Max 1960, table II
    assert len(levels) == 2**bits and levels.sum().abs() < 1e-5
    torch.testing.assert_close(levels.diff(), torch.full((2**bits - 1,), step), atol=1e-4, rtol=0)


def test_lloyd_max_levels_lose_less_on_gaussian_numbers_and_rotation_makes_numbers_gaussian() -> None:
    random = torch.Generator().manual_seed(0)
    gaussian = torch.randn(1 << 16, generator=random)
    heavy = gaussian.sign() * gaussian.abs() ** 3  # a few large numbers in each block

    def loss(x: torch.Tensor, **chosen: object) -> float:
        return nmse(x, Factors(**{"scale": "mse", **chosen}).roundtrip(x, 4, 128, 1))  # type: ignore[arg-type]

    assert loss(gaussian) < 0.9 * loss(gaussian, levels="uniform")
    assert loss(gaussian, rounds=0) == pytest.approx(loss(gaussian), rel=0.02)
    assert loss(heavy, rounds=1) < 0.5 * loss(heavy, rounds=0)
    assert loss(gaussian, rounding="random") > 1.5 * loss(gaussian)


def test_rounding_at_random_is_right_in_the_mean_and_to_a_neighbour() -> None:
    levels = torch.tensor([-2.0, -0.5, 0.25, 1.0])
    u = torch.linspace(-2.5, 1.5, 41)
    drawn = torch.stack([rounded_at_random(u, levels, seed) for seed in range(1000)])
    inside = (u > -2) & (u < 1)
    torch.testing.assert_close(drawn.mean(0)[inside], u[inside], atol=0.1, rtol=0)
    assert (drawn[:, u < -2] == -2).all() and (drawn[:, u > 1] == 1).all()
    assert all(len(drawn[:, i].unique()) <= 2 for i in range(len(u)))


@pytest.mark.parametrize("rounding", CHOICES["rounding"])
def test_unbiased_scales_and_random_rounding_average_out(rounding: str) -> None:
    x = torch.randn(128, generator=torch.Generator().manual_seed(5))

    def mean_error(scale: str) -> float:
        one = Factors(1, scale=scale, rounding=rounding)
        return nmse(x, sum(one.roundtrip(x, 2, 128, seed) for seed in range(800)) / 800)  # type: ignore[arg-type]

    assert mean_error("unbiased") < 2e-3 < mean_error("mse")


def test_qsgd_is_unbiased_and_keeps_the_largest() -> None:
    x = torch.randn(2, 100, generator=torch.Generator().manual_seed(9)) ** 3
    once = qsgd(x, 4, 64, 0)
    assert once.shape == x.shape and once.abs().max() == x.abs().max()
    mean = sum(qsgd(x, 4, 64, seed) for seed in range(800)) / 800
    assert nmse(x, mean) < 5 * nmse(x, once) / 800  # type: ignore[arg-type]
    assert not qsgd(torch.zeros(70), 2, 64, 0).any()


def test_zeros_stay_and_wrong_choices_are_refused() -> None:
    for rounds in (0, 2):
        assert not Factors(rounds, rounding="random").roundtrip(torch.zeros(3, 50), 4, 64, 0).any()
    assert Factors().roundtrip(torch.ones(3, 50, dtype=torch.bfloat16), 4, 64, 0).shape == (3, 50)
    for wrong in ({"rounds": 4}, {"levels": "nf4"}, {"scale": "rms"}, {"rounding": "up"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Factors(**wrong)
    with pytest.raises(ValueError, match="bits"):
        uniform_levels(9)

"""The estimate of a bias against known ones; what is searched among is told apart by split."""

from __future__ import annotations

import pytest
import torch

from tq import Codec
from tq.lab import vector_codes
from tq.quant.bounds import prod_variance
from tq.quant.codebook import distortion
from tq.train.model import load


class Shrinks:
    """A codec that halves and adds noise of the seed."""

    def __init__(self, seed: int, noise: float = 0.5, factor: float = 0.5) -> None:
        self.seed, self.noise, self.factor = seed, noise, factor

    def encode(self, x: torch.Tensor, impl: str) -> torch.Tensor:
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(self.seed))
        return self.factor * x + self.noise * drawn

    def decode(self, code: torch.Tensor, impl: str) -> torch.Tensor:
        return code


def test_a_known_bias_is_found_and_noise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_codes, "Codec", Shrinks)
    x = torch.ones(64)
    value, error = vector_codes.squared_bias(x, 400)
    assert abs(value - 0.25) < 4 * error < 0.05  # (1 - 0.5)^2
    value, error = vector_codes.squared_bias(x, 400, factor=1.0)
    assert abs(value) < 4 * error < 0.01
    exact, error = vector_codes.squared_bias(x, 60, noise=0.0)
    assert exact == pytest.approx(0.25) and error == pytest.approx(0, abs=1e-9)


def test_its_standard_error_is_that_of_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_codes, "Codec", lambda seed, start: Shrinks(seed + start, factor=1.0))
    found = [vector_codes.squared_bias(torch.ones(64), 100, start=1000 * k) for k in range(40)]
    spread = torch.tensor([value for value, _ in found]).std().item()
    assert spread / 2 < sum(error for _, error in found) / len(found) < 2 * spread


@pytest.mark.parametrize(("seeds", "groups"), [(100, 2), (10, 20), (30, 20)])
def test_groups_that_do_not_fill_are_refused(seeds: int, groups: int) -> None:
    with pytest.raises(ValueError, match=f"seeds={seeds}, groups={groups}"):
        vector_codes.squared_bias(torch.ones(8), seeds, groups)


def test_coders_make_vectors_like_the_given_ones() -> None:
    x = torch.nn.functional.normalize(torch.randn(300, 128, generator=torch.Generator().manual_seed(0)), dim=1)
    made = {name: make() for name, make in vector_codes.coders(x, 4, 300, "reference").items()}
    errors = {name: float((y - x).square().sum(1).mean()) for name, y in made.items()}
    assert all(y.shape == x.shape for y in made.values())
    assert errors["TurboQuant mse"] == pytest.approx(distortion(4), rel=0.05)
    assert errors["TurboQuant prod"] == pytest.approx(prod_variance(4, 1), rel=0.1)
    assert max(errors.values()) < 0.5, errors
    assert errors["same, least-squares scale"] < errors["EDEN scale"]
    same = vector_codes.roundtrip(Codec(4, 128, "unbiased", 1), x, "reference")
    torch.testing.assert_close(made["EDEN scale"], same)


def test_hidden_states_are_unit_vectors_of_both_splits() -> None:
    corpus = load("stdlib", max_bytes=200_000)
    stored, asked = vector_codes.hidden_states(corpus, 2, (500, 60))
    again, _ = vector_codes.hidden_states(corpus, 2, (500, 60))
    assert stored.shape[0] == 500 and asked.shape == (60, stored.shape[1])
    for part in (stored, asked):
        torch.testing.assert_close(part.norm(dim=1), torch.ones(len(part)))
    assert torch.equal(stored, again) and not torch.equal(stored[:60], asked)

"""Integer quantizers of weights: their grids, and what GPTQ and its order gain on correlated inputs."""

from __future__ import annotations

import pytest
import torch

from tests.infer.test_gptq import layer
from tq.infer.gptq import output_error
from tq.lab.weight_rivals import integer_gptq, rounding, stored_bits


def test_weights_lie_on_a_grid_of_their_group() -> None:
    weight, moments = layer(16, 128)
    for quantize in (rounding(3, 32), integer_gptq(3, 32)):
        found = quantize(weight, moments)
        for row in range(16):
            for group in found[row].split(32):
                assert len(group.unique()) <= 8
    grid = rounding(4, 32)(weight, moments)
    assert torch.allclose(rounding(4, 32)(grid, moments), grid, atol=1e-2), "what is on the grid stays, but for fp16"


@pytest.mark.parametrize("bits", (3, 4))
def test_gptq_and_its_order_are_nearer(bits: int) -> None:
    weight, moments = layer(96, 192)
    ways = rounding(bits, 64), integer_gptq(bits, 64, ordered=False), integer_gptq(bits, 64)
    errors = [output_error(weight, quantize(weight, moments), moments) for quantize in ways]
    assert errors[2] < errors[1] < 0.7 * errors[0]


def test_without_correlation_gptq_is_rounding() -> None:
    weight, _ = layer(16, 128)
    identity = torch.eye(128, dtype=torch.float64)
    assert torch.equal(integer_gptq(4, 32)(weight, identity), rounding(4, 32)(weight, identity))


def test_stored_bits() -> None:
    assert stored_bits(4, 64) == 4 + 20 / 64

"""What is foretold of a kernel, what its machine code runs, and what a step asks of a GPU."""

from __future__ import annotations

import pytest
import torch

from tq import Codec
from tq.lab import on_gpu
from tq.lab.training_step import SHAPES, Setting
from tq.train.optim import TurboQuantAdamW

CARD = on_gpu.Card("paper", processors=132, clock_hz=1.7e9, copy_bytes_per_s=4.2e12)
PLAIN = Codec(4, 128, rounds=1)


def test_the_slower_of_bytes_and_instructions_is_foretold() -> None:
    rate = 132 * 4 * 32 * 1.7e9
    assert CARD.instructions_per_s == rate
    assert on_gpu.foretold(CARD, 10.0, 4.5) == (1.0, "bytes")
    share, limit = on_gpu.foretold(CARD, 100.0, 4.5)
    assert limit == "instructions" and share == pytest.approx((4.5 / 4.2e12) / (100 / rate))
    edge = 4.5 / 4.2e12 * rate  # both take as long
    assert on_gpu.foretold(CARD, 1.001 * edge, 4.5)[0] == pytest.approx(1 / 1.001)


@pytest.mark.parametrize(("kind", "dtype", "most"), [
    ("encode", torch.float32, 27), ("encode", torch.bfloat16, 30), ("decode", torch.float32, 16),
    ("decode", torch.bfloat16, 18),
])  # fmt: skip
def test_what_numbers_of_usual_sizes_cost(kind: str, dtype: torch.dtype, most: float) -> None:
    """Less than with the branches that few programs take; a bound that a slower kernel would break."""
    from tq.kernels import gpu
    from tq.lab import sm90

    usual = on_gpu.instructions(kind, PLAIN, dtype)
    whole = sm90.resources(*gpu.compiled(kind, 90, rounds=1, dtype=dtype))["instructions_per_element"]
    assert 8 < usual < most and usual < whole


def test_settings_by_their_bits() -> None:
    made = on_gpu.codecs((1, 8))
    assert list(made) == ["1 bit", "8 bits"]
    assert made["8 bits"] == (Codec(8, rounds=1, nonfinite="propagate"), torch.float32)


def test_without_a_gpu_it_says_so() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch sees no GPU here"):
            on_gpu.card(1 << 10)


@pytest.mark.gpu
def test_a_graph_of_a_step_outlives_others() -> None:
    """Another capture gives unused memory back to the driver: what a graph writes to must not be among it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: none here")

    def make(weights: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return TurboQuantAdamW(
            weights, lr=lr, variant="exact", state=(4, 8), nonfinite="propagate", warmup=0, capturable=True
        )

    first, second = on_gpu.replayed(make, 256), on_gpu.replayed(make, 256)
    for replay in (first, second, first):
        optimizer = replay()
    torch.cuda.synchronize()
    assert optimizer.steps_done == 5
    asked = on_gpu.traced(first)
    assert asked["launches"] == 1 and asked["waits"] == 0 and asked["kernels_s"] > 0


@pytest.mark.gpu
def test_peaks_fall_with_what_is_kept() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: none here")
    setting = Setting(SHAPES["25m"], 4, torch.bfloat16, "cuda")
    found = on_gpu.peaks(setting, (4, 8), ("plain", "activations in 4 bits"))
    assert found[8]["plain"] > found[4]["plain"] > found[4]["activations in 4 bits"]

"""A GPU's memories: what is read is what lies there, and a split layer has the bits of a whole one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tq.lab import gpu_memory

READS = """
import torch
from tq.lab.gpu_memory import TILE, read_again
x = torch.arange(3 * TILE, dtype=torch.float32) / TILE
sums = torch.zeros(2)
print(read_again(x, sums, 2) == 4 * TILE * 4)
tiles = x.view(3, TILE).double().sum(1)  # the first program reads tiles 0 and 2, the second 1 and 0
print(torch.allclose(sums.double(), torch.stack([tiles[0] + tiles[2], tiles[1] + tiles[0]])))
"""


def test_programs_read_one_tile_after_another() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", READS], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("x", [torch.zeros(gpu_memory.TILE + 1), torch.zeros(gpu_memory.TILE, dtype=torch.float64)])
def test_what_cannot_be_read_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"a multiple of {gpu_memory.TILE} numbers in fp32, got"):
        gpu_memory.read_again(x, torch.zeros(1), 1)


def test_a_layer_in_three_places_has_the_same_bits() -> None:
    found = gpu_memory.split_layer(96, 5, "cpu", 2)
    assert found["same"] is True
    assert isinstance(found["over"], list) and len(found["over"]) == 2


@pytest.mark.gpu
def test_the_second_level_is_faster_than_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: none here")
    rates = gpu_memory.read_rates((1 << 24, 1 << 30), 3)
    assert min(rates[1 << 24]) > max(rates[1 << 30])

"""The plain loop makes the codec's codes, so that its speed may stand beside the kernel's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tq import Codec
from tq.lab import plain_loop

PLAIN = Codec(4, 128, rounds=1, nonfinite="propagate")


@pytest.mark.parametrize("block", [64, 128])
def test_its_codes_are_the_reference_s(block: int) -> None:
    codec = replace(PLAIN, block=block, seed=3)
    x = torch.randn(4 * plain_loop.GROUP * block, generator=torch.Generator().manual_seed(1))
    call, payload, scales = plain_loop.encoder(codec, x)
    call()
    code = codec.encode(x, impl="reference")
    assert (payload == code.payload).float().mean() > 0.9999  # a coordinate on a threshold may fall on its other side
    assert (scales / code.scales - 1).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [({"bits": 3}, "bits=3"), ({"rounds": 2}, "rounds=2"), ({"scale": "mse", "search": 5}, "scale='mse'")],
)
def test_another_codec_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plain_loop.encoder(replace(PLAIN, **change), torch.zeros(1 << 13))


@pytest.mark.parametrize("x", [torch.zeros(128), torch.zeros(1 << 13).half(), torch.zeros(1 << 14)[::2]])
def test_another_input_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="x: contiguous fp32"):
        plain_loop.encoder(PLAIN, x)


def test_torch_keeps_its_threads() -> None:
    """Numba's pool sets the number for all of OpenMP when it starts, once a process; waiting threads would spin."""
    script = """
import torch
from tq import Codec
from tq.lab import plain_loop
torch.set_num_threads(1)
plain_loop.encoder(Codec(4, 128, rounds=1), torch.randn(1 << 13))[0]()
print(torch.get_num_threads())
"""
    env = os.environ | {"NUMBA_NUM_THREADS": "2", "PYTHONPATH": str(Path(plain_loop.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]

"""What hooks cost, and the codec in PyTorch's operations that the kernels are timed beside."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tq import Codec
from tq.lab import hook_costs
from tq.lab.torch_codec import WholeTensors
from tq.lab.training_step import SHAPES, Setting
from tq.quant.formats import nmse


def test_every_way_is_timed_beside_ddp() -> None:
    setting = Setting(SHAPES["tiny"], 2)
    rows = hook_costs.measure(setting, ["4 bits", "bf16"], repeats=3, progress=False)
    assert list(rows) == ["DDP", "bf16", "4 bits"]
    for name, row in rows.items():
        assert len(row.seconds) == 3 and row.kernels_s is None
        assert row.calls == (0 if name == "DDP" else 1)
        assert all(0 < host < step for host, step in zip(row.host_s, row.seconds, strict=False))


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"among DDP, .*got \['8 bits'\]"):
        hook_costs.measure(Setting(SHAPES["tiny"], 2), ["8 bits"])


def test_help() -> None:
    said = subprocess.run([sys.executable, "-m", "tq.lab.hook_costs", "--help"], capture_output=True, text=True)
    assert said.returncode == 0 and "--sequences" in said.stdout


@pytest.mark.parametrize("rounds", [1, 2])
def test_codes_of_whole_tensors_are_the_codecs(rounds: int) -> None:
    codec = Codec(4, 128, rounds=rounds, nonfinite="propagate")
    x, whole = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)), WholeTensors(codec, "cpu")
    code, (payload, scales) = codec.encode(x), whole.encode(x)
    assert (code.payload != payload).float().mean() < 1e-3
    assert torch.allclose(code.scales, scales, rtol=1e-3)
    assert nmse(codec.decode(code), whole.decode(code.payload, code.scales)) < 1e-10


def test_another_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="unbiased"):
        WholeTensors(Codec(scale="mse"), "cpu")

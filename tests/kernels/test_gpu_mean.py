"""The kernels of a mean over ranks: in Triton's interpreter against codecs one after another, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")
CASES = """
import torch
from tq import Codec
from tq.quant.rank_mean import RankMean

CPU = torch.device("cpu")


def check(first, second, numel, ranks, exact, small=1.0):
    first, second = (Codec(**given, nonfinite="propagate") for given in (first, second))
    made = RankMean.of((first, second), (5,), ranks, CPU)
    signs, blocks = made.signs(7), -(-numel // first.block)
    xs = [torch.randn(numel) * small for _ in range(ranks)]
    seeded = [first.derive(5, 1, rank).at_step(7) for rank in range(ranks)]
    codes = [codec.encode(x, impl="triton") for codec, x in zip(seeded, xs)]
    total = seeded[0].decode(codes[0], impl="triton")
    for codec, code in zip(seeded[1:], codes[1:]):
        codec.decode(code, out=total, impl="triton", accumulate=True)
    last = second.derive(5, 2).at_step(7)
    wanted = last.encode(total, impl="triton", factor=1 / ranks)
    room = blocks + 2
    parts = torch.full((ranks, room, first.packed_bytes), 255, dtype=torch.uint8)
    scales = torch.full((ranks, room), float("nan"), dtype=first.scale_dtype)
    for rank, x in enumerate(xs):
        made.encode(x.view(1, -1), parts[rank, :blocks], scales[rank, :blocks], signs, rank)
        assert torch.equal(parts[rank, :blocks], codes[rank].payload), "payload of a rank"
        assert torch.equal(scales[rank, :blocks], codes[rank].scales), "scales of a rank"
    payload = torch.full((room, second.packed_bytes), 7, dtype=torch.uint8)
    own = torch.full((room,), 7.0, dtype=second.scale_dtype)
    made.average(parts, scales, payload, own, signs, numel)
    assert torch.equal(payload[:blocks], wanted.payload), "payload of the mean"
    if exact:
        assert torch.equal(own[:blocks], wanted.scales), "scales of the mean"
    torch.testing.assert_close(own[:blocks], wanted.scales, rtol=1e-5, atol=0.0)
    assert bool((payload[blocks:] == 7).all()) and bool((own[blocks:] == 7).all()), "written beyond the end"
    out = torch.full((numel,), float("nan"))
    made.decode(payload[:blocks], own[:blocks], out, signs)
    last.decode(wanted, impl="triton")
    torch.testing.assert_close(out, last.decode(wanted, impl="triton"), rtol=1e-5, atol=0.0)
    summed = torch.full((numel,), float("nan"))
    made.total(parts, scales, summed, signs, float(ranks))
    assert torch.equal(summed, total / ranks), "sum"


torch.manual_seed(0)
check(dict(bits=4), dict(bits=4), 128 * 17 + 77, 3, True)
check(dict(bits=4), dict(bits=4), 300, 2, True, small=1e-18)
check(dict(bits=2, rounds=1, scale="norm", scale_dtype=torch.bfloat16), dict(bits=8, rounds=3), 128 * 5, 2, True)
check(dict(bits=3, block=64, rounds=1), dict(bits=2, block=64, rounds=1, scale="mse", search=5), 64 * 9 + 5, 2, False)
print("all")
"""


def test_the_codes_are_those_of_codecs_one_after_another() -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", CASES], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["all"], done.stderr[-3000:]


@pytest.mark.parametrize(
    "setting", [{}, {"rounds": 1}, {"bits": 8}, {"bits": 2, "search": 5, "scale": "mse"}, {"tiling": "tail"}], ids=str
)
def test_nothing_spills(setting: dict[str, Any]) -> None:
    from tq.kernels import gpu_mean
    from tq.lab import sm90

    found = sm90.resources(*gpu_mean.compiled(90, **setting))
    assert found["spills"] == 0
    assert found["instructions_per_element"] < 140

"""What the chapter on checkpoints measures with: codecs that come back, entropies, restarts, kills and flips."""

from __future__ import annotations

import math

import pytest
import torch

from tq.lab import checkpoints, saving
from tq.train.model.corpus import load


@pytest.fixture(scope="module")
def run():
    run = checkpoints.trainer(load("stdlib", max_bytes=300_000), "tiny", 12, seed=1)
    for _ in range(8):
        run.step()
    return run


def test_every_codec_here_is_lossless_and_ours_is_the_smallest(run):
    kinds = checkpoints.kinds(checkpoints.parts_of(run))
    found = {
        (name, kind): checkpoints.compress(codec, *kinds[kind], 1)
        for name, codec in checkpoints.codecs().items() for kind in kinds
    }  # fmt: skip
    for (name, kind), it in found.items():
        assert it.encode_mb_s > 0 and it.decode_mb_s > 0
        # at its slowest level pcodec is level with ours on weights, as the page says
        assert name == "pcodec, level 12" or it.ratio <= found["ours", kind].ratio, (name, kind)
    assert found["ours", "v"].ratio > 1.2 and set(checkpoints.missing()) <= set(checkpoints.MAKERS)


def test_a_codec_that_loses_is_caught():
    wrong = checkpoints.Lossless(lambda tensor, _: b"", len, lambda code, _: b"\0" * 40)
    with pytest.raises(AssertionError, match="not lossless"):
        checkpoints.compress(wrong, [torch.ones(10)], [None], 1)


def test_bits_of_noise_and_of_constants():
    noise = checkpoints.bit_entropies([torch.randn(100_000, generator=torch.Generator().manual_seed(0))])
    assert noise[0] > 0.99 and all(bit > 0.99 for bit in noise[11:]) and noise[2] < 0.35 and len(noise) == 32
    assert checkpoints.bit_entropies([torch.ones(10, dtype=torch.bfloat16)]) == [0.0] * 16


def test_what_did_not_change_takes_nothing():
    x = [torch.randn(300, 300, generator=torch.Generator().manual_seed(0))]
    assert checkpoints.delta(x, x) > 1000
    assert checkpoints.delta(x, [-x[0]]) > 4


def test_a_restart_from_everything_changes_nothing(run):
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    gaps = checkpoints.resume_gaps(run, checkpoints.LADDER, 2)
    assert gaps["exact"] == 0 and all(math.isfinite(gap) for gap in gaps.values())
    assert abs(gaps["no moments"]) > abs(gaps["m in 8 bits, v in 8"]) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True)), "left as it was"


def test_stalls_of_all_ways(tmp_path):
    state = {"w": torch.randn(500, 1000), "v": torch.rand(500, 1000)}
    taken = saving.stalls(state, tmp_path, 2)
    assert {len(times) for times in taken.values()} == {2} and "ours async" in taken
    assert min(taken["ours"]) > min(taken["ours async"]) >= 0


def test_kills_and_flips_lose_nothing_of_ours(tmp_path):
    for name in ("ours", "ours dcp"):
        killed = saving.kill(saving.WAYS[name], tmp_path / "a", 6)
        assert killed["steps"] > 0 and killed["kills"] == 6 and killed["lost"] == killed["torn"] == 0
        assert saving.flip(saving.WAYS[name], tmp_path / "b", 40) == {"flips": 40, "silent": 0, "refused": 40}


def test_the_harness_sees_what_is_lost(tmp_path):
    """The same flips pass PyTorch's own file in silence."""
    assert saving.flip(saving.WAYS["torch.save"], tmp_path, 20)["silent"] > 10


def test_steps_beside_a_save_are_timed(run, tmp_path):
    ratios = saving.slowdown(run.step, {"w": torch.randn(500, 500)}, tmp_path, 2, 3)
    assert len(ratios) == 3 and min(ratios) > 0.3

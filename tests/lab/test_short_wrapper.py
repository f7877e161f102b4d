"""The short wrapper is lossless and as short as it says."""

import pytest
import torch

from tq.lab import short_wrapper


def test_lossless_and_short(tmp_path):
    state = {
        "w": torch.randn(300, 70) * 0.02, "scalar": torch.tensor(-0.0), "empty": torch.zeros(0, 3),
        "odd": torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 3e38]),
    }  # fmt: skip
    short_wrapper.save(tmp_path / "x", state)
    found = short_wrapper.load(tmp_path / "x")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))
    assert (tmp_path / "x").stat().st_size < 0.87 * 4 * 300 * 70
    assert 20 < short_wrapper.lines() <= 33


def test_another_dtype_is_refused(tmp_path):
    with pytest.raises(TypeError, match="w is torch.float64"):
        short_wrapper.save(tmp_path / "x", {"w": torch.zeros(3, dtype=torch.float64)})

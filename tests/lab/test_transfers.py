"""What is timed moves what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tq.lab import transfers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_transfer_runs_and_leaves_no_file(tmp_path: Path) -> None:
    calls = transfers.calls(DEVICE, 1 << 16, tmp_path)
    assert {"memory", "disk read", "disk write", "disk both"} <= set(calls) and ("both" in calls) == (DEVICE == "cuda")
    for call in calls.values():
        call()
    assert not list(tmp_path.iterdir())
    copied = calls["memory"]()
    assert copied.nbytes == 1 << 16 and copied.unique().tolist() == [1]


def test_broken_pages_are_refused(tmp_path: Path) -> None:
    for nbytes in (0, 4097):
        with pytest.raises(ValueError, match="multiple of 4096"):
            transfers.calls("cpu", nbytes, tmp_path)

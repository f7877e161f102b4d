"""Under PyTorch's distributed checkpoint: any number of ranks reads what any other wrote, and a kill loses nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tq.train import tqk
from tq.train.tqk.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what no_dist=True asks for


def state_of(step: int) -> dict:
    return {
        "model": {"w": torch.full((20, 30), float(step)), "scalar": torch.tensor(float(step))},
        "optim": {"state": {"w": {"exp_avg": torch.ones(20, 30), "exp_avg_sq": torch.ones(20, 30)}}},
        "step": step, "betas": (0.9, 0.95), "names": ["a", None, True], "none": None,
    }  # fmt: skip


def empty() -> dict:
    state = state_of(0)
    for tensor in (state["model"]["w"], *state["optim"]["state"]["w"].values()):
        tensor.fill_(-1)
    return state | {"betas": None, "names": None}


def loaded(folder: Path) -> dict:
    state = empty()
    dcp.load(state, storage_reader=Reader(folder), no_dist=True)
    return state


def test_one_process_and_objects_that_are_no_tensors(tmp_path):
    for step in (1, 2, 3):
        dcp.save(state_of(step), storage_writer=Writer(tmp_path / "a" / "b"), no_dist=True)
    state = loaded(tmp_path / "a" / "b")
    assert state["step"] == 3 and state["betas"] == (0.9, 0.95) and state["names"] == ["a", None, True]
    assert (state["model"]["w"] == 3).all() and state["model"]["scalar"] == 3
    assert (state["optim"]["state"]["w"]["exp_avg"] == 1).all()
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert len(names) == 2 and names[1] == "metadata.tqk", "files of earlier savings are gone"
    with tqk.File(tmp_path / "a" / "b" / names[0]) as file:
        assert file.names()[0] == "model.scalar@" or "model.w@0,0" in file.names()


def test_nothing_is_unpickled_from_the_disk(tmp_path, monkeypatch):
    import pickle

    dcp.save(state_of(1), storage_writer=Writer(tmp_path), no_dist=True)

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for turn in range(2):
        state = {"model": {"w": torch.zeros(20, 30)}}
        dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
        assert (state["model"]["w"] == 1).all()
        if turn == 0:  # Numba unpickles the compiled kernels of its own cache, once
            monkeypatch.setattr(pickle, "load", refuse)
            monkeypatch.setattr(pickle, "loads", refuse)


def test_a_flipped_byte_is_an_error_and_no_number(tmp_path):
    """PyTorch's own files load it."""
    dcp.save(state_of(1), storage_writer=Writer(tmp_path), no_dist=True)
    file = next(path for path in tmp_path.iterdir() if path.name != "metadata.tqk")
    whole = file.read_bytes()
    for at in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(BaseException, match="is damaged") as caught:  # CheckpointException is no Exception
            loaded(tmp_path)
        assert not isinstance(caught.value, AssertionError)
    file.write_bytes(whole)
    assert loaded(tmp_path)["step"] == 1


def test_what_a_file_cannot_hold_leaves_the_checkpoint_before(tmp_path):
    dcp.save(state_of(1), storage_writer=Writer(tmp_path), no_dist=True)
    with pytest.raises(BaseException, match="cannot hold a set"):
        dcp.save(state_of(2) | {"names": {1, 2}}, storage_writer=Writer(tmp_path), no_dist=True)
    assert loaded(tmp_path)["step"] == 1


def test_kills_while_the_same_folder_is_saved_to(tmp_path):
    """The same kills leave PyTorch's own folder with nothing that can be loaded."""
    draw, step = random.Random(0), 0
    dcp.save(state_of(0), storage_writer=Writer(tmp_path), no_dist=True)
    for _ in range(30):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    step += 1
                    dcp.save(state_of(step), storage_writer=Writer(tmp_path, threads=1), no_dist=True)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.01, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = loaded(tmp_path)
        assert (state["model"]["w"] == state["step"]).all() and state["step"] >= step
        step = state["step"]
    assert step > 5


@pytest.mark.xdist_group("ranks")
def test_four_ranks_to_two_to_one_to_three(tmp_path):
    script, environment = Path(__file__).with_name("reshard.py"), os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = torch.load(tmp_path / "save-4.pt")
    assert len(list((tmp_path / "checkpoint").iterdir())) == 5

    def compare(a, b):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
        elif isinstance(a, dict):
            assert list(a) == list(b)
            for key in a:
                compare(a[key], b[key])
        else:
            assert a == b

    for ranks in (2, 1, 3, 4):
        compare(saved, torch.load(tmp_path / f"load-{ranks}.pt"))

"""Folders of checkpoints: whatever moment the machine or a process stops at, the last one or the new one is there."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.train.tqk.crashes import Recorder, after_crash
from tests.train.tqk.test_file import Failing
from tq.train import tqk
from tq.train.tqk import Checkpoints


def state_at(step: int) -> dict:
    frozen = torch.arange(200.0).reshape(20, 10)
    return {"step": step, "w": torch.full((300,), float(step)), "noise": torch.randn(50), "frozen": frozen}


def whole(found, step: int) -> None:
    assert found["step"] == step and (found["w"] == step).all()


def test_the_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=3)
    with pytest.raises(FileNotFoundError, match="no whole checkpoint in b"):
        checkpoints.load()
    for step in (1, 5, 9, 200):
        assert checkpoints.save(step, state_at(step)) > 500
    assert checkpoints.steps() == [5, 9, 200] and len(list(checkpoints.folder.iterdir())) == 3
    whole(checkpoints.load(), 200)
    whole(checkpoints.load(5), 5)
    with pytest.raises(FileNotFoundError, match="of step 1 in"):
        checkpoints.load(1)
    for keep in (0, 1):
        with pytest.raises(ValueError, match="at least 2"):
            Checkpoints(tmp_path, keep=keep)
    with pytest.raises(ValueError, match="negative"):
        checkpoints.save(-1, {})


def test_a_step_that_is_saved_again_does_not_touch_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, {"step": 5, "w": torch.zeros(3)})
    checkpoints.save(5, {"step": 5, "w": torch.full((3,), 5.0)})
    whole(checkpoints.load(), 5)
    assert len(list(tmp_path.iterdir())) == 2 and checkpoints.steps() == [5]


def test_a_damaged_one_has_another_behind_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state_at(step))
    newest = max(tmp_path.iterdir()) / "rank-0.tqk"
    content = bytearray(newest.read_bytes())
    content[len(content) // 3] ^= 4
    newest.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="rank-0.tqk is damaged.*the checkpoint before it is loaded"):
        whole(checkpoints.load(), 1)
    with pytest.raises(tqk.DamagedFile):
        checkpoints.load(2)
    newest.unlink()
    with pytest.warns(RuntimeWarning, match="missing"):
        whole(checkpoints.load(), 1)
    shutil.copy(max(tmp_path.iterdir()).with_name("0000000001-0") / "rank-0.tqk", newest)
    with pytest.warns(RuntimeWarning, match="another saving|its size"):
        whole(checkpoints.load(), 1)


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "sync_folder"])
def test_a_failed_save_leaves_the_last_one(tmp_path, operation):
    Checkpoints(tmp_path).save(1, state_at(1))
    for number in range(6):
        failing = Checkpoints(tmp_path, disk=Failing(operation, number, errno.EIO))
        try:
            failing.save(2, state_at(2))
        except tqk.SaveFailed as error:
            assert "what was saved before it is untouched" in str(error)
            found = Checkpoints(tmp_path).load()
            whole(found, found["step"])  # where the very last operation failed, the new one may be there
            assert found["step"] == 1 or operation in ("rename", "sync_folder")
        else:
            whole(Checkpoints(tmp_path).load(), 2)
            shutil.rmtree(tmp_path)
            Checkpoints(tmp_path).save(1, state_at(1))


def crash_states(folder: Path, target: Path, many: int, seed: int, share: bool = False) -> int:
    """Try so many states of a disk after crashes; returns how many had a checkpoint."""
    recorder, done = Recorder(), {}
    checkpoints = Checkpoints(folder, disk=recorder, share=share)
    for step in range(1, 6):
        checkpoints.save(step, state_at(step))
        done[len(recorder.log)] = step
    draw, found = random.Random(seed), 0
    for _ in range(many):
        moment = draw.randrange(len(recorder.log) + 1)
        last = max([step for at, step in done.items() if at <= moment], default=0)
        after_crash(recorder.log[:moment], folder.parent, target, draw)
        try:
            state = Checkpoints(target / folder.name).load()
        except FileNotFoundError:
            assert last == 0, f"after operation {moment}, when step {last} was saved, nothing can be loaded"
        else:
            assert state["step"] in (last, last + 1), f"after operation {moment}: step {state['step']}, not {last}"
            whole(state, state["step"])
            found += 1
        shutil.rmtree(target, ignore_errors=True)
    return found


@pytest.mark.parametrize(("share", "many"), [(False, 1_000), (True, 300)])
def test_a_thousand_crashes(tmp_path, share, many):
    assert crash_states(tmp_path / "disk" / "run", tmp_path / "after", many, seed=0, share=share) > 0.7 * many


@pytest.mark.soak
@pytest.mark.parametrize("share", [False, True])
def test_ten_thousand_crashes(tmp_path, share):
    assert crash_states(tmp_path / "disk" / "run", tmp_path / "after", 10_000, seed=3, share=share) > 7_000


@pytest.mark.parametrize("share", [False, True])
def test_the_crash_states_find_a_writer_that_forgets(tmp_path, monkeypatch, share):
    """The test itself: without the fsync of the file, or of the folder, it must fail."""
    for forgotten in ("sync", "sync_folder"):
        folder = tmp_path / forgotten / "run"
        folder.parent.mkdir()
        monkeypatch.setattr(Recorder, forgotten, lambda self, what: None)
        with pytest.raises((AssertionError, tqk.DamagedFile), match="after operation|is damaged"):
            crash_states(folder, tmp_path / "after", 500, seed=1, share=share)
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "after", ignore_errors=True)


def kills(folder: Path, many: int, share: bool = False) -> list[int]:
    """Kill a process that saves without end, at random moments, so many times; the step found after each."""
    draw, steps = random.Random(2), []
    Checkpoints(folder).save(0, state_at(0))
    for _ in range(many):
        step = Checkpoints(folder).load()["step"]
        child = os.fork()
        if child == 0:
            try:
                saving = Checkpoints(folder, threads=1, share=share)
                while True:
                    step += 1
                    saving.save(step, state_at(step))
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.001, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        state = Checkpoints(folder).load()
        whole(state, state["step"])
        steps.append(state["step"])
    return steps


@pytest.mark.parametrize(("share", "many"), [(False, 200), (True, 60)])
def test_two_hundred_kills(tmp_path, share, many):
    steps = kills(tmp_path / "run", many, share)
    assert steps == sorted(steps) and len(set(steps)) > many // 10
    Checkpoints(tmp_path / "run").save(10_000, state_at(10_000))
    assert len(list((tmp_path / "run").iterdir())) == 2, "what killed processes left is removed"

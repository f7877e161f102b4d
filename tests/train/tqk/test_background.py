"""Saving beside training: nothing of the next step gets into a file, errors are not lost, memory is used again."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tq.train import tqk
from tq.train.tqk import Background, Checkpoints


def test_nothing_of_the_next_step_gets_in(tmp_path):
    """Every byte is changed the moment that save returns."""
    checkpoints = Checkpoints(tmp_path, threads=1)
    weights = [torch.zeros(300, 1000) for _ in range(4)]
    with Background(lambda item: checkpoints.save(item[0], item[1])) as saving:
        for step in range(1, 6):
            saving.save((step, {"w": weights, "step": torch.tensor(float(step - 1))}))
            for weight in weights:
                weight.add_(1)
            if step > 3:
                saving.wait()
                state = checkpoints.load()
                assert all((weight == step - 1).all() for weight in state["w"]) and state["step"] == step - 1
    assert checkpoints.steps() == [4, 5]


def test_memory_is_used_again_and_given_back():
    seen = []
    saving = Background(lambda state: seen.append(state["w"].data_ptr()))
    weight = torch.zeros(1000)
    for _ in range(3):
        saving.save({"w": weight, "tied": weight})
    saving.wait()
    assert len(set(seen)) == 1 and saving.held_bytes == weight.nbytes
    saving.save({"w": torch.zeros(10)})
    saving.wait()
    assert saving.held_bytes == 40
    saving.close()
    assert saving.held_bytes == 0


def test_one_at_a_time_and_the_stall_is_told():
    gate, running, most = threading.Event(), [], []

    def save(state):
        running.append(1)
        most.append(len(running))
        gate.wait(10)
        running.pop()
        return state["n"]

    with Background(save) as saving:
        first = saving.save({"n": 1})
        assert saving.stalled_s < 1 and not first.done()
        threading.Timer(0.3, gate.set).start()
        second = saving.save({"n": 2})
        assert saving.stalled_s > 0.2 and first.done()
        assert second.result(timeout=10) == 2
    assert max(most) == 1


def test_an_error_is_raised_once_and_never_lost(tmp_path):
    def save(state):
        raise tqk.SaveFailed("the disk is full")

    saving = Background(save)
    saving.save({})
    with pytest.raises(tqk.SaveFailed):
        saving.save({})
    saving.save({})
    with pytest.raises(tqk.SaveFailed):
        saving.close()
    with pytest.raises(TypeError, match="cannot hold"):
        Background(save).save({"a": object()})


def test_training_waits_for_a_copy_and_not_for_the_file(tmp_path):
    weights = {str(k): torch.randn(1000, 1000) for k in range(8)}
    path = tmp_path / "x.tqk"
    began = time.perf_counter()
    tqk.save(path, weights)
    whole = time.perf_counter() - began
    with Background(lambda state: tqk.save(path, state)) as saving:
        for _ in range(3):
            saving.wait()
            saving.save(weights)
    assert saving.stalled_s < whole / 3

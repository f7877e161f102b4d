"""python -m tq.train.tqk: look, check, convert; one sentence where something is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.train.tqk.test_file import same, state_of
from tq.train import tqk
from tq.train.tqk.__main__ import main


def test_inspect_and_verify(tmp_path, capsys):
    path = tmp_path / "x.tqk"
    tqk.save(path, state_of())
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "optimizer/state/0/exp_avg " in out and "optimizer/state/0/exp_avg_sq" in out and "the same as" in out
    assert "300x200" in out and "times smaller" in out
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "y.tqk").write_bytes(damaged)
    assert main(["verify", str(path), str(tmp_path / "y.tqk"), str(tmp_path / "none.tqk")]) == 1
    out, err = capsys.readouterr()
    assert out == f"{path}: whole\n" and "y.tqk is damaged" in err and "none.tqk" in err and len(err.splitlines()) == 2


def test_convert_there_and_back(tmp_path, capsys):
    state = {key: value for key, value in state_of().items() if key != "dtype"}
    torch.save(state, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.tqk")]) == 0
    assert main(["convert", str(tmp_path / "b.tqk"), str(tmp_path / "c.pt")]) == 0
    back = torch.load(tmp_path / "c.pt")
    for each in (state, back):
        each["optimizer"]["state"][0].pop("step")
    assert same(back, state) and "bytes, from" in capsys.readouterr().out


def test_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    weights = {"a.weight": torch.randn(50, 60), "b": torch.ones(3, dtype=torch.bfloat16)}
    library.save_file(weights, tmp_path / "a.safetensors")
    assert main(["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.tqk")]) == 0
    assert same(tqk.load(tmp_path / "b.tqk"), weights)
    assert main(["convert", str(tmp_path / "b.tqk"), str(tmp_path / "c.safetensors")]) == 0
    assert same(library.load_file(tmp_path / "c.safetensors"), weights)


def test_what_cannot_be_converted(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("executed",)

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    tqk.save(tmp_path / "a.tqk", {"a": 1})
    for source, target, why in (
        ("evil.pt", "x.tqk", "without running"), ("a.tqk", "a.zip", "ending must be"), ("a.npy", "b.tqk", "ending"),
        ("none.tqk", "b.tqk", "No such file"),
    ):  # fmt: skip
        assert main(["convert", str(tmp_path / source), str(tmp_path / target)]) == 1
        out, err = capsys.readouterr()
        assert why in err and len(err.splitlines()) == 1 and "executed" not in out
        assert not (tmp_path / target).exists()
    with pytest.raises(SystemExit):
        main([])


def test_the_command_has_the_name_of_checkpoints_too(tmp_path):
    tqk.save(tmp_path / "x.tqk", state_of())
    lines = [
        subprocess.run([sys.executable, "-m", module, "verify", tmp_path / "x.tqk"], capture_output=True, text=True)
        for module in ("tq.train.tqk", "tq.train.checkpoint")
    ]
    assert lines[0].returncode == lines[1].returncode == 0
    assert lines[0].stdout == lines[1].stdout == f"{tmp_path / 'x.tqk'}: whole\n" and not lines[1].stderr

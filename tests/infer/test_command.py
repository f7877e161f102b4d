"""The command line: from a model to a file, what that costs, and one sentence where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tq.infer import trained
from tq.infer.__main__ import main

pytest.importorskip("numba", reason="needs numba")
pytest.importorskip("tokenizers", reason="needs tokenizers")
pytestmark = pytest.mark.skipif(trained.obstacle() is not None, reason="needs the book's own model")


def test_quantize_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With default lengths, which are more than this model's context."""
    out = str(tmp_path / "small")
    few = ["--sequences", "2"]
    assert main(["quantize", "book", "--bits", "4", "--method", "nearest", "--out", out, *few]) == 0
    assert "4.25 bits per weight" in capsys.readouterr().out
    assert main(["evaluate", f"{out}/model.safetensors", "--model", "book", *few]) == 0
    assert "stored bits per weight      4.25" in capsys.readouterr().out


def test_layers_of_different_bits_have_the_mean_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "small")
    given = ["--bits", "3", "--mixed", "--mean", "3.5", "--sequences", "2", "--length", "64", "--out", out]
    assert main(["quantize", "book", *given]) == 0
    stored = float(capsys.readouterr().out.split(" bits per weight")[0].split()[-1])
    assert 3.6 < stored <= 3.75


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["quantize", "book", "--bits", "8", "--method", "trellis", "--out", "OUT"], "a trellis has 2, 3, 4, 5 bits"),
        (["quantize", "book", "--bits", "2", "--mixed", "--out", "OUT"], "--mixed needs a mean between 2 and 5 bits"),
        (["quantize", "book", "--mixed", "--mean", "5.5", "--out", "OUT"], "between 2 and 5 bits, got 5.5"),
        (["quantize", "book", "--mean", "3.5", "--out", "OUT"], "--mean is of --mixed"),
        (["evaluate", "nothing.safetensors", "--model", "book"], "no file nothing.safetensors"),
    ],
)
def test_what_cannot_be(
    asked: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([one.replace("OUT", str(tmp_path / "small")) for one in asked]) == 1
    assert said in capsys.readouterr().err

"""Engines of others: what is missing costs a sentence, and what fails says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tq.lab.engines import __main__ as command
from tq.lab.engines.catalog import ENGINES, MARK, Engine, EngineFailed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TQ_ENGINES", str(tmp_path))
    return tmp_path


def ready(name: str, folder: Path, needs: tuple[str, ...] = ("a==1",)) -> Engine:
    engine = Engine(name, "An engine", needs)
    (folder / name).mkdir()
    (folder / name / MARK).write_text("\n".join(needs))
    return engine


def test_what_is_missing_costs_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ENGINES.values():
        assert "is not installed" in str(engine.obstacle()) or "needs Node.js" in str(engine.obstacle())
        with pytest.raises(EngineFailed, match="not installed|needs Node.js"):
            engine.run("anything")
    assert command.main(["list"]) == 0
    assert all(engine.title in capsys.readouterr().out for engine in list(ENGINES.values())[:1])


def test_other_pins_are_no_installation(folder: Path) -> None:
    engine = ready("one", folder)
    assert engine.obstacle() is None
    assert Engine("one", "An engine", ("a==2",)).obstacle() is not None


def test_a_program_sees_the_engine_s_packages_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ready("one", folder)
    (folder / "one" / "only_there.py").write_text("print('from its folder')")
    monkeypatch.setattr(Engine, "_command", lambda self, program, given: (
        [sys.executable, "-c", f"import {program}"], {"PYTHONPATH": str(self.folder)}
    ))  # fmt: skip
    assert engine.run("only_there") == "from its folder\n"
    with pytest.raises(EngineFailed, match=r"(?s)An engine: .*No module named 'nowhere'"):
        engine.run("nowhere")


def test_everything_is_pinned() -> None:
    for engine in ENGINES.values():
        assert all(("@" in need[1:] if engine.node else "==" in need) for need in engine.needs)

"""`make soak` with the clock ahead: what it runs, what it reports, and what it says where there is no libfaketime."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(tmp_path: Path, fails: str = "", missing: str = "") -> subprocess.CompletedProcess[str]:
    """`.ci/clock` of a copy, with a python that fails at arguments with ``fails`` in them and else prints its clock."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "date", "dirname", "env", "mkdir", "tail"):
        (commands / name).symlink_to(str(shutil.which(name)))
    fail = f'case "$*" in *"{fails or "no such"}"*) echo "went wrong"; exit 3;; esac'
    for name, script in {"python": f'{fail}; echo "ran, $FAKETIME"', "faketime": ":", "cc": ":"}.items():
        if name != missing:
            (commands / name).write_text(f"#!/bin/bash\n{script}\n")
            (commands / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "clock", tmp_path / ".ci")
    environment = {"PATH": str(commands), "PY": "python"}
    return subprocess.run([tmp_path / ".ci" / "clock"], env=environment, capture_output=True, text=True)


def test_the_suite_and_both_commands_run_with_both_clocks(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 0
    for ahead in ("+300d", "+3y"):
        for command in ("tq.economics cost", "tq.book status", "pytest tests"):
            assert [line for line in result.stdout.splitlines() if command in line and line.endswith(f"ran, {ahead}")]


@pytest.mark.parametrize("command", ["tq.economics cost", "tq.book status", "pytest tests"])
def test_one_failure_fails_the_whole(tmp_path: Path, command: str) -> None:
    result = run(tmp_path, fails=command)
    assert result.returncode == 1
    assert result.stdout.count("went wrong") == 2 and result.stdout.count("ran, ") == 4


@pytest.mark.parametrize("missing", ["faketime", "cc"])
def test_where_a_tool_is_missing_one_line_says_so(tmp_path: Path, missing: str) -> None:
    result = run(tmp_path, missing=missing)
    (line,) = result.stdout.splitlines()
    assert result.returncode == 0 and line.startswith(f"Nothing was run with the clock ahead: '{missing}' is missing")


def test_soak_sets_the_clock_ahead() -> None:
    assert ".ci/clock" in subprocess.run(["make", "-n", "soak"], cwd=ROOT, capture_output=True, text=True).stdout
    assert os.access(ROOT / ".ci" / "clock", os.X_OK)

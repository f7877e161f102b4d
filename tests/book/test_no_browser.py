"""On a machine without a browser everything else is tested, and one line says what was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.book import chromium
from tests.book import helpers as h


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """An environment with all the commands of this one except browsers."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for command in Path(folder).glob("*") if folder else ():
            if command.name not in chromium.NAMES and not (commands / command.name).is_symlink():
                (commands / command.name).symlink_to(command)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PATH": str(commands), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path), "PYTHONPATH": str(h.ROOT)}
    for name in ("TQ_CHROMIUM", "CI"):
        environment.pop(name, None)
    return environment


def pytest_run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=h.ROOT, env=environment, capture_output=True, text=True)


def test_the_whole_suite_is_collected(without: dict[str, str]) -> None:
    found = pytest_run(without, "--collect-only", "tests")
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr
    for file in ("test_browser", "test_calculators"):
        assert f"tests/book/{file}.py::" in found.stdout


def test_one_line_says_what_was_not_tested(without: dict[str, str]) -> None:
    found = pytest_run(without, "tests/book/test_browser.py", "tests/book/test_calculators.py")
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr
    (line,) = [line for line in found.stdout.splitlines() if "needs a browser" in line]
    assert "tests/book/test_browser.py, tests/book/test_calculators.py: needs a browser: no page was opened" in line
    assert " passed" in found.stdout

"""A run: what a file builds is built once, and its end tells the largest process, the slowest tests and what failed."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import subprocess, sys, time

def test_large():
    subprocess.run([sys.executable, "-S", "-c", "x = bytearray(700_000_000); x[::4096] = b'x' * len(x[::4096])"])

def test_slow():
    time.sleep(0.5)

def test_quick():
    pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_end_of_a_run(tmp_path: Path, workers: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--durations=2", "-n", workers, "tests"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout
    peak = re.search(r"^largest process: (\S+) GB(?:, in tests/test_it.py::(.*))?$", result.stdout, re.MULTILINE)
    inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # a process begins with its maker's mark
    assert peak and 0.7 <= float(peak.group(1)) < max(1.5, inherited + 0.2)
    assert peak.group(2) == "test_large" or inherited > 0.7
    steps = re.findall(r"^    it grew by (\S+) GB in tests/test_it.py::(.*)$", result.stdout, re.MULTILINE)
    assert len(steps) <= 3 and (not steps or steps[0][0] == max(step for step, _ in steps))
    lines = (tmp_path / "_build" / "slowest-tests.txt").read_text().splitlines()
    assert {line.split("::")[1] for line in lines} == {"test_large", "test_slow"}


FAILING = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no such fixture")

def test_wrong():
    assert 1 + 1 == 3, "the sum of one and one"

def test_error(broken):
    pass

def test_right():
    pass
"""


def test_what_failed_is_told_with_what_it_said(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(FAILING)
    (tmp_path / "tests" / "test_broken.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-q", "--durations=2", "--continue-on-collection-errors", "tests"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 1, result.stdout
    lines = (tmp_path / "_build" / "failed-tests.txt").read_text().splitlines()
    said = {line.split(": ")[0].rsplit("/")[-1]: line for line in lines}
    assert said.keys() == {"test_it.py::test_wrong", "test_it.py::test_error", "test_broken.py"}
    assert "the sum of one and one" in said["test_it.py::test_wrong"]
    assert "no such fixture" in said["test_it.py::test_error"] and "no_such_module" in said["test_broken.py"]


SHARED = """
import os, time
from pathlib import Path
import pytest

@pytest.fixture(scope={scope!r})
def built():
    with open(Path(__file__).with_suffix(".made"), "a") as file:
        print(os.getpid(), file=file)

@pytest.fixture
def through(built):
    pass

@pytest.mark.parametrize("i", range(8))
def test_it(through, i):
    time.sleep(0.05)  # time enough for the other worker to take some, if it may
"""


def test_what_a_file_builds_once_is_built_once(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for scope in ("module", "session", "function"):
        (tmp_path / f"test_{scope}.py").write_text(SHARED.format(scope=scope))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and "24 passed" in result.stdout, result.stdout
    made = {scope: (tmp_path / f"test_{scope}.made").read_text().split() for scope in ("module", "session", "function")}
    assert len(made["module"]) == len(made["session"]) == 1
    assert len(made["function"]) == 8

"""``python -m tq.kernels``: what was compiled ahead is not compiled again."""

import os
import subprocess
import sys
from pathlib import Path

from tq.kernels import ahead, matvec, planes

BUILD = "from tq.kernels import ahead; print(ahead.build(ahead.names()[-2:]))"


def test_kernels_that_were_compiled_ahead_are_there(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", BUILD]
    for compiled in ("2\n", "0\n"):
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert told.stdout == compiled


def test_every_kernel_is_named_once() -> None:
    named = ahead.names()
    assert len(named) == len(set(named)) == 2 * 8 + 10 + 2 + 3 * (3 if matvec.integers_run() else 2) + len(planes.NAMES)


def test_kernels_are_compiled_in_other_processes() -> None:
    """What the command does with its work: functions that a spawned process can be asked for."""
    command = [
        sys.executable,
        "-c",
        f"from tq.kernels import ahead; ahead.names = lambda: {ahead.names()[-2:]}; ahead.main()",
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("2 CPU kernels: ")


def test_help_says_what_it_is_for() -> None:
    told = subprocess.run([sys.executable, "-m", "tq.kernels", "--help"], capture_output=True, text=True, check=True)
    assert "Numba's cache" in told.stdout and "--jobs" in told.stdout

"""A GPU without one: planted faults are found, sound programs are not blamed, and every way of training is sound.

Triton has to interpret from the start, so a child process runs the cases; every case is a test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import simulated_cases
from tq.lab import gpu_paths

pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(scope="module")
def answers() -> dict[str, str | None]:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.lab.simulated_cases"]
    said = subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(line) for line in said.splitlines())


@pytest.mark.parametrize("name", simulated_cases.CASES)
def test_a_case(answers: dict[str, str | None], name: str) -> None:
    assert answers[name] is None, answers[name]


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    both = [name for name in gpu_paths.PATHS if name.startswith(("DDP", "FSDP2"))]
    return gpu_paths.run(["optimizer, capturable", *both, "DiLoCo, delayed"])


def test_nothing_waits_and_all_is_in_order(paths: dict[str, Any]) -> None:
    for name, found in paths.items():
        assert not found["problems"], name
    assert len(paths) == 6


def test_collectives_are_launches_too(paths: dict[str, Any]) -> None:
    assert paths["FSDP2 reduce-scatter, in pieces"]["what"]["alltoall_base_"] == 1
    assert paths["DDP hook, in pieces"]["what"]["_allgather_base_"] == 2  # of two buckets
    assert paths["FSDP2 reduce-scatter"]["what"]["alltoall_base_"] == 2  # payload and scales
    assert paths["DDP hook"]["what"]["_allgather_base_"] == 4


def test_launches_become_no_more(paths: dict[str, Any]) -> None:
    assert paths["FSDP2 reduce-scatter"]["launches"] <= 6 and paths["DDP hook"]["launches"] <= 10


def test_it_is_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from tq.lab.simulated_torch import simulate

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"), simulate():
        pass


def test_unknown_paths_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_paths.main(["nonsense"])
    assert "unknown paths: nonsense" in capsys.readouterr().err

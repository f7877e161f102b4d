"""Counters of a GPU's profiler: what it is asked, and what is read of its answer."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from tq import Codec
from tq.lab import gpu_counters

NAMES = ["ID", "Kernel Name", *gpu_counters.METRICS]


def page(rows: list[list[str]]) -> str:
    """As ncu prints it: its own lines, the names, the units, a row for each launch."""
    lines = [NAMES, ["", "", *["%"] * len(gpu_counters.METRICS)], *rows]
    told = "\n".join(",".join(f'"{value}"' for value in line) for line in lines)
    return f"==PROF== Connected to process 1\n{told}\n==PROF== Disconnected\n"


def launch(first: str) -> list[str]:
    return ["0", "_encode_kernel", first, *["2.5"] * (len(gpu_counters.METRICS) - 1)]


def test_values_are_read_in_order_with_thousands() -> None:
    found = gpu_counters.read(page([launch("81.25"), launch("1,024.5")]))
    assert [row[gpu_counters.BUSY["memory"]] for row in found] == [81.25, 1024.5]
    assert set(found[0]) == set(gpu_counters.METRICS) and found[1][gpu_counters.TIME] == 2.5


def test_a_setting_survives_as_json() -> None:
    codec = Codec(4, 64, rounds=2, scale="mse", search=5, nonfinite="propagate")
    told = gpu_counters.told(codec, torch.bfloat16)
    assert told.pop("dtype") == "bfloat16" and Codec(**told) == codec


def test_launches_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [gpu_counters.told(Codec(bits), torch.float32) for bits in (4, 8)]
    asked: list[Any] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, page([launch(str(n)) for n in range(rows)]), "")

    monkeypatch.setattr(gpu_counters, "ncu", lambda: "ncu")
    monkeypatch.setattr(gpu_counters.subprocess, "run", run)
    rows = 4
    found = gpu_counters.busy(settings)
    assert found is not None
    memory = gpu_counters.BUSY["memory"]
    assert [(one["encode"][memory], one["decode"][memory]) for one in found] == [(0, 1), (2, 3)]
    assert asked[0][0] == "ncu" and ",".join(gpu_counters.METRICS) in asked[0]
    rows = 3
    assert gpu_counters.busy(settings) is None


def test_without_the_profiler_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_counters, "ncu", lambda: None)
    assert gpu_counters.busy([]) is None
    monkeypatch.setattr(gpu_counters, "ncu", lambda: "/nowhere/ncu")
    assert gpu_counters.busy([]) is None


@pytest.mark.parametrize("given", [[], ["--help"], ["a", "b"]])
def test_its_command_says_what_it_wants(given: list[str]) -> None:
    with pytest.raises(SystemExit, match="the launches that are profiled"):
        gpu_counters.main(given)

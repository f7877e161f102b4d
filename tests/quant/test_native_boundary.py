"""No input crashes the process or is coded wrongly in silence: hostile inputs by number, and the largest."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from tq import Codec

SCRIPT = Path(__file__).with_name("hostile.py")
ROOT = SCRIPT.parents[2]
SAMPLE, SOAK = 5_000, 200_000  # cases of every run, and of `make soak` besides
PATIENCE_S = 1800.0  # compiling all kernels for the first time takes minutes on a busy machine


def run_cases(first: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """How often each kind was accepted and refused, and all problems; a child that dies is one of them."""
    progress = folder / "progress"
    progress.write_bytes(struct.pack("<q", first))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    counts: Counter[str] = Counter()
    problems: list[str] = []
    at, end = first, first + count
    while at < end and len(problems) < 20:
        command = [sys.executable, str(SCRIPT), str(at), str(end - at), str(progress)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        if child.returncode == 0:
            found = json.loads(child.stdout)
            return counts + Counter(found["counts"]), problems + found["problems"]
        at = struct.unpack("<q", progress.read_bytes())[0]
        cause = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit {child.returncode}"
        problems.append(f"case {at}: {cause}: {child.stderr[-500:]}")
        at += 1
    return counts, problems


def check(first: int, count: int, folder: Path) -> None:
    counts, problems = run_cases(first, count, folder)
    assert not problems, "\n".join(problems[:5])
    assert counts.total() == count
    kinds = {key.rsplit(" ", 1)[0] for key in counts}
    assert len(kinds) == 11 and {"encode_layout accepted", "encode_refused refused"} <= set(counts)


@pytest.mark.parametrize("part", range(2))
def test_hostile_inputs_work_exactly_or_are_refused(part: int, tmp_path: Path) -> None:
    check(part * SAMPLE // 2, SAMPLE // 2, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(40))
def test_two_hundred_thousand_hostile_inputs(part: int, tmp_path: Path) -> None:
    check(SAMPLE + part * SOAK // 40, SOAK // 40, tmp_path)


def test_a_crash_is_seen_and_the_cases_after_it_run(tmp_path: Path) -> None:
    counts, problems = run_cases(-1, 3, tmp_path)
    assert len(problems) == 1 and problems[0].startswith("case -1: SIGSEGV")
    assert counts.total() == 2


def untouched(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written to."""
    store = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(store, dtype=dtype)


@pytest.mark.soak
@pytest.mark.parametrize("rows", (False, True))
def test_two_to_the_31_elements(rows: bool) -> None:
    """Islands of numbers in a sea of zeros, on both sides of 2**31 elements and 2**32 bytes, and at the end."""
    codec, width, numel = Codec(1, 1024, scale_dtype=torch.bfloat16), 1 << 16, (1 << 31) + (1 << 17)
    x = untouched(numel, torch.bfloat16)
    islands = [0, (1 << 30) - 1024, (1 << 31) - 1024, 1 << 31, numel - 1024]
    generator = torch.Generator().manual_seed(0)
    for at in islands:
        x[at : at + 1024] = torch.randn(1024, generator=generator)
    code = codec.encode(x.view(-1, width), rows=rows)
    coded = code.scales.nonzero().flatten().tolist()
    assert coded == [at // 1024 for at in islands]
    wanted = [codec.encode(x[at : at + 1024], impl="reference") for at in islands]
    for block, want in zip(coded, wanted, strict=True):
        assert torch.equal(code.payload[block], want.payload[0]) and code.scales[block] == want.scales[0]
    if psutil.virtual_memory().available > 3 * x.nbytes:
        y = codec.decode(code).view(-1)
        for at, want in zip(islands, wanted, strict=True):
            island, exact = y[at : at + 1024], codec.decode(want, impl="reference")
            assert torch.equal(island, codec.decode(want))
            assert torch.allclose(island, exact, rtol=2.0**-7, atol=1e-5)  # neighbours in bf16 at most
            island.zero_()
        assert not any(part.any() for part in y.split(1 << 26))

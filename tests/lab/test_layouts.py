"""A split model is the model of one process, a broken split is not, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tq.lab import layout_bytes, layout_framing, layouts
from tq.train.crew import CrewError, crew
from tq.train.split import Plan

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("ZeRO-1", "ZeRO-3", "TP", "PP, searched", "EP", "CP, balanced")


def test_layouts_of_four_ranks_and_two_faults() -> None:
    alone = layout_framing.private_network()
    found = layouts.prove(
        4, NAMES, steps=2, faults=("an unscaled micro-batch", "a missing all-reduce"), timeout_s=120, prefix=alone
    )
    for name in NAMES:
        assert layouts.passes(found[name]), (name, found[name])
        for rank in found[name]:
            assert layout_bytes.agree(rank), (name, rank["sent"], rank["formula"])
            assert rank["held"] == rank["held_formula"], name
        wire = layouts.on_the_wire(found[name])
        if alone:  # elsewhere other processes move the counters
            assert 0.98 < wire["interface"] / wire["gloo"] < 1.05, (name, wire)
    if alone:  # headers, handshakes and acknowledgements are those of the same operations alone
        known = crew("tq.lab.layout_framing:ruler", 4, 120.0, alone, sizes=[1024, 65536])[0]
        for name in NAMES:
            expected = layout_framing.expected([rank["calls"] for rank in found[name]], known)
            assert expected == pytest.approx(found[name][0]["wire"], rel=0.01), name
    zero = layouts.on_the_wire(found["ZeRO-3"])
    assert zero["gloo"] > 1.3 * zero["payload"]  # gloo's reduce-scatter is an all-reduce
    for fault in ("an unscaled micro-batch", "a missing all-reduce"):
        assert not layouts.passes(found[fault])
    assert found["ZeRO-3"][0]["held"]["weights"] * 4 == found["CP, balanced"][0]["held"]["weights"]
    moments = [rank["held"]["states"] for rank in found["ZeRO-1"]]
    assert len(set(moments)) > 1  # whole tensors cannot be dealt out evenly


def one_rank_raises(folder: Path) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the cat is on the keyboard")


def everyone_sleeps(folder: Path) -> None:
    (folder.parent / f"crew-test-{os.getpid()}").touch()
    time.sleep(60)


def test_a_rank_that_raises_ends_the_crew() -> None:
    with pytest.raises(CrewError, match="the cat is on the keyboard"):
        crew("tests.lab.test_layouts:one_rank_raises", 2, 60.0)
    with pytest.raises(ValueError, match="module:function"):
        crew("no_function", 2)


def test_nobody_is_left_after_a_kill(tmp_path: Path) -> None:
    script = "from tq.train.crew import crew; crew('tests.lab.test_layouts:everyone_sleeps', 3, 60.0)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("crew-test-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("crew-test-*")]
    assert len(ranks) == 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, ranks))


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    "given, said",
    [
        ({"dp": 0}, "every axis needs at least one rank"),
        ({"dp": 2, "zero": 4}, "zero must be 0, 1, 2 or 3"),
        ({"dp": 2, "tp": 2, "zero": 1}, "needs zero 0, 2 or 3"),
        ({"dp": 4, "ep": 2}, "ep must be 1 or dp"),
        ({"sequence": True}, "need tp > 1"),
        ({"dp": 2, "bits": {"nothing": 4}}, "bits must name some of"),
        ({"dp": 2, "bits": {"weights": 4}}, "needs data parallelism of its kind"),
        ({"dp": 4, "replicas": 3, "zero": 3}, "replicas must divide"),
    ],
)
def test_plans_that_contradict_themselves(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan(**given)  # type: ignore[arg-type]

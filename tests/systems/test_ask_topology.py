"""`python -m tq.systems topology`: answers that were worked out by hand, a picture, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from tq.systems import ask_topology, fabrics, loads
from tq.systems.__main__ import main


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["topology", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_four_to_one_costs_an_interleaved_ring_four_times_and_a_packed_one_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--hosts", "192", "--oversubscription", "4", "--alpha-us", "0", "--hop-us", "0", "--routing", "spray")
    found = ask(capsys, *words)
    slow = {a["layout"]: a["slowdown"] for a in found["answers"]}
    assert slow["packed"] == pytest.approx(1.0) and slow["interleaved"] == pytest.approx(4.0)
    # 2 * 191 / 192 * 1 GB at 50 GB/s
    assert found["answers"][0]["ideal"] == pytest.approx(2 * 191 / 192 / 50)
    assert found["hosts"] == 192 and found["bill"]["switches"] == 4 + 1


def test_a_thin_tree_of_1024_leaves_is_512_times_as_slow(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--topology", "tree", "--hosts", "1024", "--traffic", "opposite", "--alpha-us", "0", "--hop-us", "0")
    found = ask(capsys, *words, "--layout", "packed", "--routing", "single")
    assert [a["slowdown"] for a in found["answers"]] == pytest.approx([512.0])


@pytest.mark.parametrize("shape", ask_topology.SHAPES)
@pytest.mark.parametrize("kind", ask_topology.KINDS)
def test_every_traffic_on_every_shape(shape: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """None is faster than its bytes allow: what a rank sends, or on rails what leaves its server."""
    words = ("--topology", shape, "--hosts", "16", "--traffic", kind, "--seeds", "2", "--alpha-us", "0")
    found = ask(capsys, *words, "--hop-us", "0", "--routing", "spray", "ecmp")
    assert found["hosts"] >= 16 and len(found["answers"]) == 6
    for a in found["answers"]:
        assert 0 < a["least"] <= a["seconds"] <= a["most"]
        assert a["slowdown"] >= (0.05 if shape in ("rails", "torus") else 1 - 1e-9)


def test_page_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "loads.svg"
    words = ["--hosts", "64", "--ports", "16", "--oversubscription", "3", "--compute-ms", "10", "--svg", str(file)]
    assert main(["topology", *words]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "64 hosts in 6 racks" in out and "of a step lost" in out and "rack switch    5 |" in out
    assert max(map(len, out.splitlines())) <= 140
    drawn = ET.fromstring(file.read_text())
    cells = [e for e in drawn.iter() if e.tag.endswith("rect")]
    assert len(cells) == 1 + 6 * 4 and drawn.find("{*}title") is not None
    assert main(["topology", "--hosts", "4", "--no-picture", "--layout", "packed", "--routing", "single"]) == 0
    assert "load of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "1"], "a whole number from 2 to 4096 is accepted, got '1'"),
        (["--hosts", "9" * 99], "a whole number from 2 to 4096"),
        (["--oversubscription", "nan"], "a number above 0 is accepted, got 'nan'"),
        (["--oversubscription", "-1"], "a number above 0"),
        (["--traffic", "gossip"], "invalid choice: 'gossip'"),
        (["--hosts", "12", "--traffic", "doubling"], "ranks must be a power of two for this collective, got 12"),
        (["--topology", "torus", "--oversubscription", "2"], "--oversubscription is of leaf-spine and rails"),
        (["--hosts", "4096"], "carry at most 2048 hosts at 1:1, got 4096"),
        (["--svg", "no/such/folder/x.svg"], "No such file or directory"),
    ],
)
def test_errors_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["topology", *words])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and said in err and err.count("\n") == 1


def test_in_a_process_of_its_own() -> None:
    said = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tq.systems", "topology", "--help"], capture_output=True, text=True
    )
    assert said.returncode == 0 and "--oversubscription" in said.stdout and "examples:" in said.stdout
    assert "matplotlib" not in said.stderr and "scipy" not in said.stderr


def test_large_pictures_are_joined_and_keep_the_busiest() -> None:
    fabric = fabrics.tree(2, 10)
    load = np.zeros(fabric.links)
    up = fabric.uplinks()
    load[up[300]] = 3.0
    cells = loads.grid(fabric, load)
    assert cells.load.shape == (512, 1)
    shown = loads.text(cells, "x")
    assert shown.count("@") == 2 and "22 rack switches" in shown  # once in the picture, once in its scale
    assert loads.text(loads.grid(fabric, np.zeros(fabric.links)), "idle").count("@") == 1

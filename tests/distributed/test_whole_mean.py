"""The DDP hook on a simulated GPU: one mean of a whole bucket has the bits of means in pieces, and fails as they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """Of each case what the ranks found."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.distributed.whole_cases"]
    said = subprocess.run(command, env=environment, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    ranks = json.loads(said.splitlines()[-1])
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


def test_the_bits_are_those_of_pieces_on_all_ranks(found: dict[str, list[Any]]) -> None:
    compared = {name: of for name, of in found.items() if name.startswith("mean of")}
    assert len(compared) == 3
    for name, of_ranks in compared.items():
        assert [same for same, _ in of_ranks] == [[True] * 2] * 3, name
        assert len({total for _, total in of_ranks}) == 1, name


def test_the_bits_of_a_reduce_scatter_are_those_of_parts(found: dict[str, list[Any]]) -> None:
    for name, calls in (("AVG of 200", 1), ("SUM of 128", 2)):
        assert [same for same, _ in found[name]] == [[True] * calls] * 3, name
        assert len({total for _, total in found[name]}) == 3, name


def test_a_block_that_is_not_finite_anywhere_is_nan_everywhere(found: dict[str, list[Any]]) -> None:
    assert found["not_finite"] == [[1, 5]] * 3


def test_a_rank_that_fails_leaves_none_waiting(found: dict[str, list[Any]]) -> None:
    assert found["one_fails"] == [True, "no room", True]


def test_ranks_that_differ_are_named(found: dict[str, list[Any]]) -> None:
    for said in found["others_ask_for_less"]:
        assert said.startswith("rank 1 asks for a whole mean of 1000 x float32 by Codec(bits=3"), said

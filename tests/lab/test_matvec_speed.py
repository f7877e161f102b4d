"""Products that are timed compute what they say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="needs numba")
from tq.lab import matvec_speed  # noqa: E402


def test_all_ways_are_timed_and_their_bytes_counted() -> None:
    found = matvec_speed.measure(256, 512, repeats=2)
    assert {"fp32", "bf16", "read", "torch int8", "torch int4", "4 bits, exact", "2 bits, paths, exact"} <= set(found)
    for each, nbytes in found.values():
        assert len(each) == 2 and min(each) > 0 and nbytes > 0
    assert found["fp32"][1] == 4 * 256 * 512 and found["4 bits, exact"][1] == 256 * 512 * 4.25 / 8
    assert found["4 bits, paths, exact"][1] == found["4 bits, exact"][1]


def test_products_are_those_of_the_codes() -> None:
    made = matvec_speed.calls(64, 128)
    plain = made["fp32"][0]()[0]
    assert torch.allclose(made["bf16"][0]().float()[0], plain, atol=0.5)
    assert torch.allclose(made["torch int8"][0]().float()[0], plain, atol=1.0)
    for _ in range(2):  # what the vector is given lies in memory that each call writes over
        found = made["4 bits, exact"][0]()
        assert 0.05 < float((found - plain).norm() / plain.norm()) < 0.15


def test_products_of_given_widths() -> None:
    found = matvec_speed.of_widths({(4, 128): 32, (3, 64): 16}, repeats=2)
    assert list(found) == [(4, 128), (3, 64)] and all(len(each) == 2 and min(each) > 0 for each in found.values())


def test_as_a_task() -> None:
    found = matvec_speed.task({"rows": 64, "columns": 128, "repeats": 2})
    assert found["fp32"][1] == 4 * 64 * 128 and len(found["fp32"][0]) == 2

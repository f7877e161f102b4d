"""Packing: exact sizes, exact inverses, and the documented layout."""

import math

import numpy as np
import pytest
import torch

from tq.quant.bits import PLANES, pack, packed_bytes, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("block", (3, 64, 100, 128, 1024))
def test_round_trip_and_size(bits, block):
    index = torch.from_numpy(np.random.default_rng(bits).integers(0, 2**bits, (17, block)).astype(np.uint8))
    code = pack(index, bits)
    assert code.shape == (17, packed_bytes(bits, block))
    assert torch.equal(unpack(code, bits, block), index)
    if block % 8 == 0:
        assert packed_bytes(bits, block) == bits * block // 8
    else:
        assert math.ceil(bits * block / 8) <= packed_bytes(bits, block) < bits * block / 8 + len(PLANES[bits])


@pytest.mark.parametrize("bits", range(1, 9))
def test_layout_against_a_naive_loop(bits):
    """Planes from the lowest bits up; inside a byte the first element in the lowest bits."""
    index = np.random.default_rng(0).integers(0, 2**bits, 64)
    expected, shift = [], 0
    for width in PLANES[bits]:
        plane = [(int(i) >> shift) % 2**width for i in index]
        per_byte = 8 // width
        for at in range(0, 64, per_byte):
            expected.append(sum(v << (width * k) for k, v in enumerate(plane[at : at + per_byte])))
        shift += width
    assert pack(torch.from_numpy(index)[None], bits)[0].tolist() == expected


def test_any_integer_dtype():
    index = torch.tensor([[0, 1, 2, 3] * 16])
    assert torch.equal(pack(index, 2), pack(index.to(torch.uint8), 2))
    assert torch.equal(pack(index, 2), pack(index.int(), 2))

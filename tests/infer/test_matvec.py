"""Packed codes times vectors, beside the decoded matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tq import Codec
from tq.quant.dispatch import codebook
from tq.quant.rotation import rotate

matvec = pytest.importorskip("tq.kernels.matvec", reason="needs numba")


def product(codec: Codec, weight: Tensor, x: Tensor, integers: bool) -> Tensor:
    code = codec.encode(weight, rows=True)
    rotated = rotate(x.reshape(-1, codec.block), codec.rounds, codec.seed).view(x.shape)
    out = torch.full((len(x), len(weight)), torch.nan)
    vectors = matvec.Vectors(rotated, codec.block, codec.bits, integers)
    matvec.multiply(code.payload, code.scales, vectors, codec.bits, codebook(codec.bits)[0], out)
    return out


@pytest.mark.parametrize("bits", matvec.BITS)
@pytest.mark.parametrize(
    ("rows", "columns", "vectors"), [(1, 64, 1), (7, 192, 1), (33, 576, 3), (64, 1536, 8), (5, 640, 5)]
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_exact(bits: int, rows: int, columns: int, vectors: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight, x = torch.randn(rows, columns, generator=generator), torch.randn(vectors, columns, generator=generator)
    codec = Codec(bits=bits, block=64, seed=5, scale_dtype=dtype)
    wanted = x @ codec.decode(codec.encode(weight, rows=True)).T
    assert torch.allclose(product(codec, weight, x, False), wanted, rtol=1e-4, atol=1e-4 * columns**0.5)


@pytest.mark.parametrize("block", (64, 128, 256))
@pytest.mark.parametrize("bits", matvec.BITS)
def test_in_integers(bits: int, block: int) -> None:
    if not matvec.integers_run():
        pytest.skip("needs AVX-512 VNNI")
    generator = torch.Generator().manual_seed(bits)
    weight, x = torch.randn(50, 768, generator=generator), torch.randn(3, 768, generator=generator)
    codec = Codec(bits=bits, block=block, seed=5)
    decoded = codec.decode(codec.encode(weight, rows=True))
    wanted = x @ decoded.T
    assert torch.allclose(product(codec, weight, x, False), wanted, rtol=1e-4, atol=3e-3)
    found = product(codec, weight, x, True)
    assert (found - wanted).norm() / wanted.norm() < 0.012
    x[:] = 0
    assert product(codec, weight, x, True).abs().max() == 0


def test_large_matrices_use_all_threads_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(515, 1024, generator=generator), torch.randn(1, 1024, generator=generator)
    codec, threads = Codec(bits=4, block=64), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(product(codec, weight, x, False))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)

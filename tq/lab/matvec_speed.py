"""A large matrix times a vector on the CPU: PyTorch's products beside those straight from codes, and memory.

The matrix must be larger than the last cache, or what is timed is not what a decoder meets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tq.infer.layers import QuantizedLinear
from tq.infer.path_product import PathProduct
from tq.infer.product import BITS, Product, integers_run
from tq.infer.trellis import TrellisCode
from tq.lab.timing import time_calls
from tq.quant.codec import Codec

BLOCK = 64


def calls(rows: int, columns: int, seed: int = 0) -> dict[str, tuple[Callable[[], Any], int]]:
    """{way: (a product of [rows, columns] with a vector, bytes of the matrix)}, and "read": the bf16 matrix summed.

    Products from codes rotate the vector first.

    Args:
        rows, columns: of the matrix; columns a multiple of 128.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, columns, generator=generator)
    weight = torch.randn(rows, columns, generator=generator)
    made: dict[str, tuple[Callable[[], Any], int]] = {}
    made["fp32"] = (lambda: x @ weight.T), weight.nbytes
    half, x_half = weight.bfloat16(), x.bfloat16()
    made["bf16"] = (lambda: x_half @ half.T), half.nbytes
    made["read"] = (lambda: half.view(torch.int32).sum(dtype=torch.int32)), half.nbytes
    made |= _of_torch(weight, x_half)
    for bits in BITS:
        for integers in (False, True) if integers_run() else (False,):
            way = "int8" if integers else "exact"
            made[f"{bits} bits, {way}"] = _of_codes(weight, x, bits, integers)
            made[f"{bits} bits, paths, {way}"] = _of_paths(rows, x, bits, integers)
    return made


def _of_torch(weight: Tensor, x_half: Tensor) -> dict[str, tuple[Callable[[], Any], int]]:
    """PyTorch's own packed products, where this build has them."""
    rows, columns = weight.shape
    scale = weight.abs().amax(1) / 127
    whole, steps = (weight / scale[:, None]).round().to(torch.int8), scale.bfloat16()
    made: dict[str, tuple[Callable[[], Any], int]] = {}
    made["torch int8"] = (lambda: torch._weight_int8pack_mm(x_half, whole, steps)), whole.nbytes + steps.nbytes
    nibbles = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    groups = torch.ones(columns // BLOCK, rows, 2, dtype=torch.bfloat16)
    made["torch int4"] = (
        (lambda: torch._weight_int4pack_mm_for_cpu(x_half, packed, BLOCK, groups)),
        packed.nbytes + groups.nbytes,
    )
    return made


def _of_codes(weight: Tensor, x: Tensor, bits: int, integers: bool) -> tuple[Callable[[], Any], int]:
    codec = Codec(bits, BLOCK, "mse", scale_dtype=torch.bfloat16)
    return _called(Product([QuantizedLinear(codec.encode(weight, rows=True))], integers), x)


def _called(product: Product | PathProduct, x: Tensor) -> tuple[Callable[[], Any], int]:
    given = x[0].numpy()

    def call() -> Tensor:
        product.x[:] = given
        return torch.from_numpy(product.run())

    return call, product.nbytes


def _of_paths(rows: int, x: Tensor, bits: int, integers: bool) -> tuple[Callable[[], Any], int]:
    """Paths drawn at random: to find the best ones would take minutes, and a product takes as long with any."""
    codec, columns = Codec(bits, BLOCK, scale_dtype=torch.bfloat16), x.shape[1]
    payload = torch.randint(256, (rows * columns * bits // 8,), dtype=torch.uint8)
    scales = torch.ones(rows * columns // BLOCK, dtype=torch.bfloat16)
    return _called(PathProduct([TrellisCode(codec, (rows, columns), payload, scales)], integers), x)


def measure(rows: int, columns: int, repeats: int = 15) -> dict[str, tuple[list[float], int]]:
    """{way: (seconds of each repeat, bytes of the matrix)}, the ways in turn: what disturbs one disturbs all."""
    made = calls(rows, columns)
    timed = time_calls({name: call for name, (call, _) in made.items()}, repeats, settle=1)
    return {name: (timed[name], nbytes) for name, (_, nbytes) in made.items()}


def of_widths(rows: Mapping[tuple[int, int], int], repeats: int = 15) -> dict[tuple[int, int], list[float]]:
    """{(bits, columns): seconds of each repeat} of products in integers, where they run, with random codes.

    rows: of each of them.
    """
    products = {}
    for (bits, columns), count in rows.items():
        weight = torch.randn(count, columns, generator=torch.Generator().manual_seed(columns))
        codec = Codec(bits, BLOCK, "mse", scale_dtype=torch.bfloat16)
        products[bits, columns] = Product([QuantizedLinear(codec.encode(weight, rows=True))], integers_run())
    timed = time_calls({str(key): product.run for key, product in products.items()}, repeats, settle=1)
    return {key: timed[str(key)] for key in products}


def task(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``measure`` as a task: "rows", "columns", "repeats"."""
    return {way: list(each) for way, each in measure(task["rows"], task["columns"], task["repeats"]).items()}

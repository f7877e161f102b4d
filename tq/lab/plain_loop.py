"""Encoding as one plain loop over blocks, for Numba: what is written first, before lanes and registers are thought of.

4 bits, one round of signs and butterflies, scale "unbiased", fp32 with fp32 scales, whole groups of 64 blocks. The
chapter on kernels measures it between the PyTorch reference and the kernel. N blocks, B block size, L levels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from tq.quant.codebook import lloyd_max
from tq.quant.codec import Codec
from tq.quant.rotation import signs

GROUP = 64  # blocks that a thread takes at a time


@numba.njit(cache=True)
def butterflies(z):  # type: ignore[no-untyped-def]
    half = 1
    while half < z.size:
        for first in range(0, z.size, 2 * half):
            for i in range(first, first + half):
                z[i], z[i + half] = z[i] + z[i + half], z[i] - z[i + half]
        half *= 2


@numba.njit(fastmath=True, cache=True)
def quantize(z, packed, scales, n, thresholds, levels):  # type: ignore[no-untyped-def]
    energy = dot = np.float32(0.0)
    for v in z:
        energy += v * v
    unit = np.float32(np.sqrt(z.size / energy))
    index = np.zeros(z.size, np.int32)
    for t in thresholds:
        for i in range(z.size):
            index[i] += np.int32(z[i] * unit > t)
    for i in range(z.size):
        dot += z[i] * levels[index[i]]
    for i in range(packed.size):
        packed[i] = index[2 * i] | index[2 * i + 1] << 4
    scales[n] = energy / dot / np.sqrt(np.float32(z.size))


@numba.njit(parallel=True, cache=True)
def one_pass(x, payload, scales, sign, thresholds, levels):  # type: ignore[no-untyped-def]
    size = sign.size
    for group in numba.prange(scales.size // GROUP):
        z = np.empty(size, np.float32)
        for n in range(GROUP * group, GROUP * group + GROUP):
            for i in range(size):
                z[i] = x[n * size + i] * sign[i]
            butterflies(z)
            quantize(z, payload[n], scales, n, thresholds, levels)


def encoder(codec: Codec, x: Tensor) -> tuple[Callable[[], Any], Tensor, Tensor]:
    """(a call that encodes `x`, the payload uint8 [N, B/2] and the scales float32 [N] that it writes).

    On as many threads as torch uses. ValueError for another codec, or an `x` that is not whole groups of fp32 blocks.
    """
    made_for = {"bits": 4, "rounds": 1, "scale": "unbiased", "search": 1, "rotation": "hadamard"}
    made_for |= {"codebook": "gaussian", "scale_dtype": torch.float32}
    for name, wanted in made_for.items():
        if getattr(codec, name) != wanted:
            raise ValueError(f"{name}={getattr(codec, name)!r}: the plain loop is written for {wanted!r}")
    if x.dtype != torch.float32 or x.numel() % (GROUP * codec.block) or not x.is_contiguous():
        wanted = f"contiguous fp32, a multiple of {GROUP * codec.block} elements"
        raise ValueError(f"x: {wanted}; got {x.dtype}, {x.numel()}, strides {x.stride()}")
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)  # starting Numba's pool sets the number of OpenMP's threads, which torch shares
    levels, thresholds = (table.astype(np.float32) for table in lloyd_max(codec.bits))
    sign = signs(codec.block, 1, codec.seed)[0].numpy()
    blocks = x.numel() // codec.block
    payload, scales = torch.empty(blocks, codec.block // 2, dtype=torch.uint8), torch.empty(blocks)
    given = (x.view(-1).numpy(), payload.numpy(), scales.numpy(), sign, thresholds, levels)
    return lambda: one_pass(*given), payload, scales

"""Attention of one token straight from coded keys and values: each code is read once, and never un-rotated.

Scores come from the rotated query, as in ``matvec``. Values are summed in their rotated domain, level times share, and
only the sum is rotated back, by whoever calls. Pages of tokens are worked on apart, each with a maximum and a sum of
its own, and are joined at the end.

Shapes: K key/value heads, V queries of one such head (1 to 4), D head size = block size (64, 128, ...), P pages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from torch import Tensor

from . import cpu, matvec
from .matvec import _LONG, RUN, _Indices, _scale
from .simd import LANES, _codelet, _Table, _Vector

MOST = 4  # queries of one key/value head
ROWS = 4  # tokens whose scores are worked on together
# places in the array of int64 that a kernel is called with; _BLOCKS is that of ``cpu``: what its threads share
_KEYS, _X, _SHARES, _SUMS, _STATS, _COUNTS, _LEVELS, _VALUE_LEVELS, _HEADS, _PAGE = 3, 4, 5, 6, 7, 9, 10, 11, 12, 13
_SIZE = 14
_STAMP = matvec._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")
_fast = numba.njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


@_codelet("bits", "vectors", "runs", "size")
def combine(code, payload, pitch, scales, shares, shares_pitch, count, out, levels, bits, vectors, runs, size):
    """Rows added up with shares. payload: of ``count`` rows of one block, ``pitch`` bytes apart; scales: of them;
    shares: fp32, one a row, ``shares_pitch`` bytes from one vector to the next; out: fp32 [V, B] in the order of lanes;
    size: bytes of a scale, 2 (bf16) or 4."""
    b, long = code.b, lambda n: ir.Constant(_LONG, n)
    table = _Table(code, levels, LANES, 1 << bits)
    sums = [cgutils.alloca_once_value(b, code.constant(0.0)) for _ in range(vectors * runs * 4)]
    for place in sums:
        b.store(code.constant(0.0), place)
    with cgutils.for_range(b, count, intp=_LONG) as loop:
        row = loop.index
        here = b.mul(pitch, row)
        scale = _scale(code, scales, b.mul(row, long(size)), size)
        each = []
        for v in range(vectors):
            share = code.read(shares, b.add(b.mul(shares_pitch, long(v)), b.mul(row, long(4))), ir.FloatType())
            each.append(code.splat(b.fmul(share, scale)))
        for run in range(runs):
            low = b.add(here, long(run * RUN * (4 if bits == 4 else 2) // 8))
            high = b.add(here, long(runs * RUN * 2 // 8 + run * RUN // 8))
            index = _Indices(code, bits, payload, low, high)
            for k in range(4):
                level = table[index[k]]
                for v in range(vectors):
                    place = sums[(v * runs + run) * 4 + k]
                    b.store(code.fma(level, each[v], _Vector(code, b.load(place))).value, place)
    for number, place in enumerate(sums):
        code.store(_Vector(code, b.load(place)), out, 64 * number)


@_fast
def _soft(scores, factor, stats):
    """Scores become exp(score - largest); stats: the largest, and their sum."""
    largest = np.float32(-np.inf)
    for t in range(scores.size):
        scores[t] *= factor
        largest = max(largest, scores[t])
    total = np.float32(0)
    for t in range(scores.size):
        scores[t] = np.exp(scores[t] - largest)
        total += scores[t]
    stats[0], stats[1] = largest, total


@_njit
def _page(given, number, kb, vb, vectors, runs, size, rows, one):
    """One page of one head."""
    width, heads, page = len(vectors), given[_HEADS], given[_PAGE]
    at = cpu._array(given[_KEYS] + 32 * number, (4,), np.int64)  # keys, their scales, values, their scales
    count = cpu._array(given[_COUNTS] + 8 * (number // heads), (1,), np.int64)[0]
    block = 4 * len(runs) * 16
    x, shares = given[_X] + 4 * width * block * (number % heads), given[_SHARES] + 4 * width * page * number
    key_bytes, value_bytes = block * len(kb) // 8, block * len(vb) // 8
    t = 0
    while t < count:
        if t + len(rows) <= count:
            matvec.dot(at[0] + t * key_bytes, key_bytes, at[1] + t * len(size), x, 4 * block, 1, shares + 4 * t,
                       4 * page, given[_LEVELS], kb, rows, vectors, runs, size)  # fmt: skip
            t += len(rows)
        else:
            matvec.dot(at[0] + t * key_bytes, key_bytes, at[1] + t * len(size), x, 4 * block, 1, shares + 4 * t,
                       4 * page, given[_LEVELS], kb, one, vectors, runs, size)  # fmt: skip
            t += 1
    scores = cpu._array(shares, (width, page), np.float32)
    stats = cpu._array(given[_STATS] + 8 * width * number, (width, 2), np.float32)
    factor = np.float32(1.0 / math.sqrt(given[_SIZE]))
    for v in range(width):
        _soft(scores[v, :count], factor, stats[v])
    combine(at[2], value_bytes, at[3], shares, 4 * page, count, given[_SUMS] + 4 * width * block * number,
            given[_VALUE_LEVELS], vb, vectors, runs, size)  # fmt: skip


@cache
def _kernel(key_bits: int, value_bits: int, vectors_: int, runs_: int, size_: int) -> Callable[[int], None]:
    """The kernel of bits of keys and values, queries a head, runs of 64 in a block, bytes of a scale."""
    kb, vb, vectors, runs, stamp = (0,) * key_bits, (0,) * value_bits, (0,) * vectors_, (0,) * runs_, _STAMP
    size, rows, one = (0,) * size_, (0,) * ROWS, (0,)

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            for number in range(first, last):
                _page(given, number, kb, vb, vectors, runs, size, rows, one)

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def attend(
    q_KVD: Tensor, pages: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], counts: Sequence[int],
    bits: tuple[int, int], levels: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs in the rotated domain of values, fp32 [K, V, D], and the logarithm of the sum of exp(score), [K, V].

    q_KVD: queries, rotated as keys are, fp32; pages: of keys the payload [K, page, bytes] and the scales [K, page, 1],
    of values likewise; counts: tokens in each; bits, levels: of keys and of values. D is the block.
    """
    heads, vectors, block = q_KVD.shape
    assert vectors <= MOST and block % RUN == 0 and pages and all(b in matvec.BITS for b in bits)
    assert q_KVD.dtype == torch.float32, q_KVD.dtype
    first, page = pages[0], pages[0][0].shape[1]
    x = q_KVD.reshape(-1, LANES, RUN // LANES).transpose(1, 2).contiguous().view(heads, vectors, block)
    starts = np.array([[part.data_ptr() for part in each] for each in pages], np.int64)
    steps = np.array([part.stride(0) * part.element_size() for part in first], np.int64)  # all pages are laid out alike
    where = (starts[:, None] + steps * np.arange(heads)[:, None]).reshape(-1, len(steps))
    items = len(where)
    shares, sums = torch.empty(items, vectors, page), torch.empty(items, vectors, block)
    stats, sizes = torch.empty(items, vectors, 2), np.asarray(counts, np.int64)
    tables = [matvec._levels(b, level.numpy().tobytes())[0] for b, level in zip(bits, levels, strict=True)]
    values: dict[int, Any] = {
        _KEYS: where.ctypes.data, _X: x.data_ptr(), _SHARES: shares.data_ptr(), _SUMS: sums.data_ptr(),
        _STATS: stats.data_ptr(), _COUNTS: sizes.ctypes.data, _LEVELS: tables[0].ctypes.data,
        _VALUE_LEVELS: tables[1].ctypes.data, _HEADS: heads, _PAGE: page, _SIZE: block,
        cpu._BLOCKS: cpu._GROUP * items,
    }  # fmt: skip
    kernel = _kernel(*bits, vectors, block // RUN, first[1].element_size())
    cpu._run(kernel, cpu._arguments(values), items * page * block)
    largest, total = stats.view(len(pages), heads, vectors, 2).unbind(3)
    weight = (largest - largest.amax(0)).exp()
    joined = (sums.view(len(pages), heads, vectors, block) * weight[..., None]).sum(0)
    total = (total * weight).sum(0)
    joined = (joined / total[..., None]).view(heads, vectors, -1, RUN // LANES, LANES).transpose(3, 4)
    return joined.reshape(heads, vectors, block), largest.amax(0) + total.log()

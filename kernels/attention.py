"""Attention of one token straight from coded keys and values: each code is read once, and never un-rotated.

Scores come from the rotated query, as in ``matvec``. Values are summed in their rotated domain, level times share, and
only the sum is rotated back. Pages of tokens are worked on apart, each with a maximum and a sum of its own, and are
joined at the end.

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
from .matvec import _LONG, RUN, _Indices, _scale, _sum
from .simd import _INT, LANES, _codelet, _Table, _Vector

MOST = 4  # queries of one key/value head
ROWS = 4  # tokens whose scores are worked on together
_LEAST, _ROUND = -87.0, 1.5 * 2.0**23  # exp of less is no normal number; added to a small number leaves it rounded
_LN2 = (0.693359375, math.log(2) - 0.693359375)  # few bits, so that a multiple is exact, and the rest
# places in the array of int64 that a kernel is called with; _BLOCKS is that of ``cpu``: what its threads share
_KEYS, _X, _SHARES, _SUMS, _STATS, _COUNTS, _LEVELS, _VALUE_LEVELS, _HEADS, _PAGE = 3, 4, 5, 6, 7, 9, 10, 11, 12, 13
_SIZE, _QUERIES, _Q, _TURN, _BACK, _PAGES, _OUT, _LSE = 14, 15, 16, 17, 18, 19, 20, 21
_RUNS = RUN // LANES
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


@_codelet()
def soften(code, scores, count, factor, stats):
    """Scores become exp(factor score - largest). scores: fp32, ``count`` of them, a multiple of 16; stats: fp32, gets
    the largest product and the sum. A NaN makes the sum NaN."""
    b, long = code.b, lambda n: ir.Constant(_LONG, n)
    most = cgutils.alloca_once_value(b, code.constant(-math.inf))
    total = cgutils.alloca_once_value(b, code.constant(0.0))
    b.store(code.constant(-math.inf), most)
    b.store(code.constant(0.0), total)
    runs, times = b.udiv(count, long(LANES)), code.splat(factor)
    with cgutils.for_range(b, runs, intp=_LONG) as loop:
        place = b.mul(loop.index, long(4 * LANES))
        score, before = code.load(scores, place) * times, _Vector(code, b.load(most))
        code.store(score, scores, place)
        b.store(code.select(score > before, score, before).value, most)
    largest = _Vector(code, b.load(most))
    for half in (8, 4, 2, 1):
        other = code.shuffle(largest, largest, [(lane + half) % LANES for lane in range(LANES)])
        largest = code.select(other > largest, other, largest)
    with cgutils.for_range(b, runs, intp=_LONG) as loop:
        place = b.mul(loop.index, long(4 * LANES))
        found = _exponential(code, code.load(scores, place) - largest)
        code.store(found, scores, place)
        b.store((_Vector(code, b.load(total)) + found).value, total)
    b.store(b.extract_element(largest.value, ir.Constant(_INT, 0)), code.at(stats, 0, ir.FloatType()))
    b.store(_sum(code, _Vector(code, b.load(total))), code.at(stats, 4, ir.FloatType()))


def _exponential(code: Any, x: _Vector) -> _Vector:
    """exp(x) of x <= 0, at least the smallest normal number, to two units in the last place; NaN stays NaN."""
    least = code.vector(_LEAST)
    x = code.select(least > x, least, x)
    shifted = code.fma(x, code.vector(1 / math.log(2)), code.vector(_ROUND))
    n = shifted - code.vector(_ROUND)
    for part in _LN2:
        x = code.fma(n, code.vector(-part), x)
    found = code.vector(1 / math.factorial(6))
    for k in range(5, -1, -1):
        found = code.fma(found, x, code.vector(1 / math.factorial(k)))
    return found * ((shifted.ints() << 23) + (127 << 23)).floats()


@_fast
def _add(total, x, weight):
    for j in range(x.size):
        total[j] += weight * x[j]


@_fast
def _product(x, y):
    total = 0.0
    for j in range(x.size):
        total += x[j] * y[j]
    return total


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
    factor, whole = np.float32(1.0 / math.sqrt(given[_SIZE])), (count + LANES - 1) // LANES * LANES
    for v in range(width):
        scores[v, count:whole] = -np.inf
        soften(shares + 4 * page * v, whole, factor, given[_STATS] + 8 * (width * number + v))
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

    return _native(body)


def _native(body: Callable) -> Callable[[int], None]:
    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


@_njit
def _lane(j):
    """Place of a number in the order of lanes."""
    return j // RUN * RUN + j % _RUNS * LANES + j % RUN // _RUNS


@_njit
def _turn(given):
    """Queries rotated as keys are, and put in the order of lanes."""
    heads, width, block = given[_HEADS], given[_QUERIES], given[_SIZE]
    q = cpu._array(given[_Q], (heads * width, block), np.float32)
    x = cpu._array(given[_X], (heads * width, block), np.float32)
    matrix = cpu._array(given[_TURN], (block, block), np.float64)
    total = np.empty(block)
    for r in range(heads * width):
        total[:] = 0.0
        for i in range(block):
            _add(total, matrix[i], np.float64(q[r, i]))
        for j in range(block):
            x[r, _lane(j)] = total[j]


@_njit
def _join(given):
    """What the pages of each head have found, put together and rotated back; and the logarithm of the sum."""
    heads, width, block, pages = given[_HEADS], given[_QUERIES], given[_SIZE], given[_PAGES]
    some = heads * width
    sums = cpu._array(given[_SUMS], (pages, some, block), np.float32)
    stats = cpu._array(given[_STATS], (pages, some, 2), np.float32)
    matrix = cpu._array(given[_BACK], (block, block), np.float64)
    out = cpu._array(given[_OUT], (some, block), np.float32)
    lse = cpu._array(given[_LSE], (some,), np.float32)
    joined, turned = np.empty(block), np.empty(block)
    for q in range(some):
        largest, total = np.float32(-np.inf), 0.0
        for p in range(pages):
            largest = max(largest, stats[p, q, 0])
        joined[:] = 0.0
        for p in range(pages):
            weight = np.exp(np.float64(stats[p, q, 0] - largest))
            total += weight * stats[p, q, 1]
            _add(joined, sums[p, q], weight)
        for j in range(block):
            turned[j] = joined[_lane(j)] / total
        for i in range(block):
            out[q, i] = _product(matrix[i], turned)
        lse[q] = largest + np.log(total)


@cache
def _around(first: bool) -> Callable[[int], None]:
    """The kernel that runs before or after those of the pages."""
    stamp, before = _STAMP, (0,) * first

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        if stamp:
            if len(before):
                _turn(given)
            else:
                _join(given)

    return _native(body)


def attend(
    q_KVD: Tensor, pages: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], counts: Sequence[int],
    bits: tuple[int, int], levels: tuple[Tensor, Tensor], rotations: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs, fp32 [K, V, D], and the logarithm of the sum of exp(score), [K, V].

    q_KVD: queries, fp32; pages: of keys the payload [K, page, bytes] and the scales [K, page, 1], of values likewise;
    counts: tokens in each; bits, levels, rotations (fp64 [D, D], which rows are multiplied with): of keys and values.
    """
    heads, vectors, block = q_KVD.shape
    assert vectors <= MOST and block % RUN == 0 and pages and all(b in matvec.BITS for b in bits)
    assert q_KVD.dtype == torch.float32, q_KVD.dtype
    first, page, q_KVD = pages[0], pages[0][0].shape[1], q_KVD.contiguous()
    starts = np.array([[part.data_ptr() for part in each] for each in pages], np.int64)
    steps = np.array([part.stride(0) * part.element_size() for part in first], np.int64)  # all pages are laid out alike
    where = (starts[:, None] + steps * np.arange(heads)[:, None]).reshape(-1, len(steps))
    items = len(where)
    shares, sums = np.empty((items, vectors, page), np.float32), np.empty((items, vectors, block), np.float32)
    stats, x, sizes = np.empty((items, vectors, 2), np.float32), np.empty(q_KVD.shape, np.float32), np.array(counts)
    tables = [matvec._levels(b, level.numpy().tobytes())[0] for b, level in zip(bits, levels, strict=True)]
    out, lse = torch.empty(heads, vectors, block), torch.empty(heads, vectors)
    given = cpu._arguments({
        _KEYS: where.ctypes.data, _X: x.ctypes.data, _SHARES: shares.ctypes.data, _SUMS: sums.ctypes.data,
        _STATS: stats.ctypes.data, _COUNTS: sizes.ctypes.data, _LEVELS: tables[0].ctypes.data,
        _VALUE_LEVELS: tables[1].ctypes.data, _HEADS: heads, _PAGE: page, _SIZE: block, _QUERIES: vectors,
        _Q: q_KVD.data_ptr(), _TURN: rotations[0].data_ptr(), _BACK: rotations[1].data_ptr(), _PAGES: len(pages),
        _OUT: out.data_ptr(), _LSE: lse.data_ptr(), cpu._BLOCKS: cpu._GROUP * items,
    })  # fmt: skip
    address = given.ctypes.data
    _around(True)(address)
    cpu._run(_kernel(*bits, vectors, block // RUN, first[1].element_size()), given, items * page * block)
    _around(False)(address)
    return out, lse

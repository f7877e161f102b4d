"""Numba kernel of GPTQ: the columns of one block rounded in turn, for every multiplier of its rows' scales.

A register holds one number each of ``LANES`` rows. The errors of a block for ``TOGETHER`` multipliers stay in
first-level cache; what a column takes over from those before it is summed in registers.

Shapes: O rows, a multiple of LANES; B block size; K multipliers; L levels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from . import cpu
from .simd import _FLOATS, _INTS, LANES, _codelet, _Table, _Vector

TOGETHER = 4  # multipliers
_LONG = ir.IntType(64)
_BYTES16 = ir.VectorType(ir.IntType(8), LANES)
# places in the array of int64 that a kernel is called with; the first three are those of ``cpu``
_W, _U, _BLOCK, _SCALES, _TRIES, _LEVELS, _INDEX, _ERROR, _BEST = 3, 4, 5, 6, 7, 9, 10, 11, 12
_ROWS = cpu._BLOCKS
_STAMP = cpu._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")


@_codelet("tries", "bits")
def column(code, w, before, count, inverse, scales, pitch, tables, errors, found, sums, tries, bits):
    """Rounds a column of 16 rows for some multipliers.

    w: its numbers, fp32 [16]; before: what each of ``count`` columns before it moves here, fp32; errors: theirs, fp32
    [count, tries, 16], where the column's own follow; found: its indices, uint8 [tries, 16]; scales: fp32, ``pitch``
    bytes from one multiplier to the next; tables: levels, then the threshold below each, fp32; sums: of squared
    errors, fp32 [tries, 16].
    """
    b, size = code.b, max(LANES, 1 << bits)
    levels = _Table(code, tables, size, 1 << bits)
    thresholds = _Table(code, b.add(tables, ir.Constant(_LONG, 4 * size)), size, 1 << bits)
    start = code.load(w)
    left = [cgutils.alloca_once(b, _FLOATS) for _ in range(tries)]
    for place in left:
        b.store(start.value, place)
    with cgutils.for_range(b, count, intp=_LONG) as loop:
        moved = code.read(before, code.times(loop.index, 4), ir.FloatType())
        factor = code.splat(b.fneg(moved))
        at = code.times(loop.index, 4 * LANES * tries)
        for k, place in enumerate(left):
            error = code.load(errors, b.add(at, ir.Constant(_LONG, 4 * LANES * k)))
            b.store(code.fma(factor, error, _Vector(code, b.load(place))).value, place)
    own = b.add(errors, code.times(count, 4 * LANES * tries))
    for k, place in enumerate(left):
        scale = code.load(scales, code.times(pitch, k))
        x, index = _Vector(code, b.load(place)), code.vector(0, _INTS)
        for bit in reversed(range(bits)):
            higher = index | code.vector(1 << bit, _INTS)
            index = code.select(x > thresholds[higher] * scale, higher, index)
        error = (x - levels[index] * scale) * code.splat(inverse)
        code.store(error, own, 4 * LANES * k)
        code.store(_Vector(code, b.trunc(index.value, _BYTES16)), found, LANES * k)
        code.store(code.fma(error, error, code.load(sums, 4 * LANES * k)), sums, 4 * LANES * k)


@_njit
def _tried(given, at, first, tables, room, best, bits, tries):
    """Some multipliers, from the one numbered ``first``, for the 16 rows from ``at`` on; the best so far is kept."""
    block, rows, width = given[_BLOCK], given[_ROWS], len(tries)
    w, u = cpu._array(given[_W], (block, rows), np.float32), cpu._array(given[_U], (block, block), np.float32)
    index = cpu._array(given[_INDEX], (block, rows), np.uint8)
    error = cpu._array(given[_ERROR], (block, rows), np.float32)
    chosen = cpu._array(given[_BEST], (rows,), np.int64)
    sums = room[: width * LANES].reshape((width, LANES))
    errors = room[width * LANES : (block + 1) * width * LANES].reshape((block, width, LANES))
    found = room[(block + 1) * width * LANES :].view(np.uint8)[: block * width * LANES].reshape((block, width, LANES))
    sums[:] = 0
    scales = given[_SCALES] + 4 * (first * rows + at)
    for j in range(block):
        column(
            cpu._address(w) + 4 * (j * rows + at), cpu._address(u) + 4 * j * block, j, np.float32(1) / u[j, j], scales,
            4 * rows, tables, cpu._address(errors), cpu._address(found) + LANES * width * j, cpu._address(sums), tries,
            bits,
        )  # fmt: skip
    for r in range(LANES):
        k = np.argmin(sums[:, r])
        if first == 0 or sums[k, r] < best[r]:
            best[r], chosen[at + r] = sums[k, r], first + k
            index[:, at + r], error[:, at + r] = found[:, k, r], errors[:, k, r]


@cache
def _kernel(bits_: int) -> Callable[[int], None]:
    """The kernel of a number of bits; see ``cpu._kernel``."""
    bits, stamp, one, some = (0,) * bits_, _STAMP, (0,), (0,) * TOGETHER

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        room, best = cpu._scratch((given[_BLOCK] + 1) * 2 * TOGETHER * LANES), np.empty(LANES, np.float32)
        while stamp:
            start, end = cpu._piece(given)
            if start == end:
                break
            for group in range(start, end):
                first = 0
                while first < given[_TRIES]:
                    if first + TOGETHER <= given[_TRIES]:
                        _tried(given, LANES * group, first, given[_LEVELS], room, best, bits, some)
                        first += TOGETHER
                    else:
                        _tried(given, LANES * group, first, given[_LEVELS], room, best, bits, one)
                        first += 1
        cpu._hold((room, best))

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def round_block(
    w: np.ndarray, scales: np.ndarray, u: np.ndarray, levels: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indices uint8 [B, O], errors fp32 [B, O], best multipliers int64 [O]) of a block of columns.

    w: fp32 [B, O], a column in a row; scales: fp32 [K, O], positive; u: fp32 [B, B]: [j, i] is what column j takes over
    of column i before it, for an error in units of u[i, i]; levels: fp32 [L], ascending. All contiguous.
    """
    block, rows = w.shape
    assert rows % LANES == 0 and scales.shape[1] == rows and u.shape == (block, block) and levels.size == 1 << bits
    assert all(x.dtype == np.float32 and x.flags.c_contiguous for x in (w, scales, u, levels))
    index, error = np.empty((block, rows), np.uint8), np.empty((block, rows), np.float32)
    best = np.empty(rows, np.int64)
    below = np.concatenate((levels[:1], (levels[1:] + levels[:-1]) / 2))
    tables = np.concatenate([np.resize(x, max(LANES, x.size)) for x in (levels, below)])
    arrays = {_W: w, _U: u, _SCALES: scales, _LEVELS: tables, _INDEX: index, _ERROR: error, _BEST: best}
    values = {place: array.ctypes.data for place, array in arrays.items()}
    values |= {_BLOCK: block, _TRIES: len(scales), _ROWS: rows, cpu._BLOCKS: rows}
    cpu._run(_kernel(bits), cpu._arguments(values), rows * block * len(scales))
    return index, error, best

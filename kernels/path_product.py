"""Numba kernels of products with weights that are paths through a trellis: a matrix of few bits times a vector.

A register holds 16 rows of one column. Their bits lie side by side; every lane takes the 14 bits that end with its own,
which are its state, and computes the value from it: times a constant, plus one, and the sum of the four bytes. One
instruction (VNNI) adds up four bytes that are multiplied, so that in integers the sum need not be formed first.

Shapes: O rows, a multiple of 16; C columns, a multiple of the block; N blocks of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from . import cpu, trellis
from .simd import _FLOATS, _INT, _INTS, LANES, _Code, _codelet, _Vector

FACTOR, SUMMAND = 34038481, 76625530  # as in ``tq.infer.trellis``
_LONG, _BYTES16, _BYTES64 = ir.IntType(64), ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.IntType(8), 64)
_SHORTS16, _SHORT = ir.VectorType(ir.IntType(16), LANES), ir.IntType(16)
# places in the array of int64 that a kernel is called with; the first three are those of ``cpu``
_TABLE, _ENTRIES, _BLOCK, _X, _X_SCALES, _SUMS, _COUNT = 3, 4, 5, 6, 7, 9, 10
# of an entry of the table: some rows of a run that are worked on together
_PAYLOAD, _PITCH, _SCALES, _STRIDE, _OUT, _GROUPS, _FIRST = range(7)
_ENTRY = 7
_STAMP = trellis._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")


def _states(code: _Code, column: ir.Value, group: int, end: ir.Value | None, bits: int) -> _Vector:
    """Of 16 rows of a column. column: where the bits of group 0 begin; end: where the column's last two bytes lie, for
    a group 0 that is the first of a run; None where other rows lie before it."""
    b, wraps = code.b, end is not None and not group
    raw = b.load(code.at(column, 0 if wraps else 2 * bits * group - 2, _BYTES16), align=1)
    second = ir.Constant(_BYTES16, ir.Undefined)
    if wraps:  # the first rows follow the last ones
        last = b.load(code.at(end, 0, _SHORT), align=1)
        wide = b.insert_element(ir.Constant(ir.VectorType(_SHORT, 8), ir.Undefined), last, ir.Constant(_INT, 0))
        second = b.bitcast(wide, _BYTES16)
    places, shifts = [], []
    for lane in range(LANES):
        stop = 16 + (lane + 1) * bits
        first = (stop - trellis.LENGTH) // 8
        shifts.append(32 - (stop - 8 * first))
        for k in (3, 2, 1, 0):
            at = first + k - (2 if wraps else 0)
            places.append(at if at >= 0 else 16 + first + k)  # from the second operand
    words = b.bitcast(b.shuffle_vector(raw, second, ir.Constant(ir.VectorType(_INT, 64), places)), _INTS)
    words = b.lshr(words, ir.Constant(_INTS, shifts))
    return _Vector(code, words) & ((1 << trellis.LENGTH) - 1)


def _hashed(code: _Code, states: _Vector) -> _Vector:
    """Words whose bytes add up to the values of states."""
    b = code.b
    product = b.mul(states.value, code.constant(FACTOR, _INTS))
    return _Vector(code, b.add(product, code.constant(SUMMAND, _INTS)))


def _dot(code: _Code, sums: _Vector, bytes_: _Vector, factors: ir.Value) -> _Vector:
    """sums plus the four bytes of each lane times as many signed ones."""
    b = code.b
    product = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_INTS, [_INTS, _INTS, _INTS]), "llvm.x86.avx512.vpdpbusd.512"
    )
    return _Vector(code, b.call(product, [sums.value, bytes_.value, factors]))


def _total(code: _Code, hashed: _Vector) -> _Vector:
    """The sum of the four bytes of each lane, less their mean."""
    if code.dot_products:
        return _dot(code, code.vector(-510, _INTS), hashed, code.constant(0x01010101, _INTS))
    pairs = (hashed & 0x00FF00FF) + ((hashed >> 8) & 0x00FF00FF)
    return ((pairs + (pairs >> 16)) & 0xFFFF) + code.vector(-510 & 0xFFFFFFFF, _INTS)


def _scales(code: _Code, address: ir.Value, group: int, size: int) -> _Vector:
    if size == 4:
        return code.load(address, 4 * LANES * group)
    shorts = code.b.load(code.at(address, 2 * LANES * group, _SHORTS16), align=1)
    return (_Vector(code, code.b.zext(shorts, _INTS)) << 16).floats()


@_codelet("bits", "groups", "first", "size", "ways")
def block(code, columns, pitch, x, count, scales, x_scale, offset, out, bits, groups, first, size, ways):
    """Adds what one block of columns gives to 16 rows times ``groups``.

    columns: where these rows' bits of the block's first column lie; pitch: bytes of a column; x: ``count`` words, fp32
    or four times the same byte; scales: of these rows; x_scale: fp32; offset: int32, what the mean adds in integers;
    out: fp32, of these rows; first: 1 where they are the first of a run, else 0; ways: 1 in fp32, 2 in integers.
    """
    b, integers = code.b, ways == 2
    start = code.splat(b.trunc(offset, _INT)).value if integers else code.constant(0.0)
    sums = [cgutils.alloca_once_value(b, start) for _ in range(groups)]
    for place in sums:
        b.store(start, place)
    with cgutils.for_range(b, count, intp=_LONG) as loop:
        column = b.add(columns, b.mul(pitch, loop.index))
        end = b.sub(b.add(column, pitch), ir.Constant(_LONG, 2)) if first else None
        factors = code.splat(b.load(code.at(x, code.times(loop.index, 4), _INT), align=1))
        for k, place in enumerate(sums):
            hashed, held = _hashed(code, _states(code, column, k, end, bits)), _Vector(code, b.load(place))
            if integers:
                found = _dot(code, held, hashed, factors.value)
            else:
                value = _Vector(code, b.sitofp(_total(code, hashed).value, _FLOATS))
                found = code.fma(value, factors.floats(), held)
            b.store(found.value, place)
    factor = code.splat(x_scale)
    for k, place in enumerate(sums):
        whole = _Vector(code, b.load(place))
        whole = _Vector(code, b.sitofp(whole.value, _FLOATS)) if integers else whole
        code.store(code.fma(whole, _scales(code, scales, k, size) * factor, code.load(out, 64 * k)), out, 64 * k)


@_njit
def _some(at, scales, out, n, given, entry, k, bits, size, ways):
    """One block of columns for at most four groups of an entry, from group ``k`` on; how many they were."""
    x, count, pitch = given[_X] + 4 * n * given[_BLOCK], given[_BLOCK], entry[_PITCH]
    x_scale = cpu._array(given[_X_SCALES], (given[_COUNT],), np.float32)[n]
    offset = np.int64(cpu._array(given[_SUMS], (given[_COUNT],), np.int32)[n])
    left, first = entry[_GROUPS] - k, entry[_FIRST] == 1 and k == 0
    if left >= 4:
        if first:
            block(at, pitch, x, count, scales, x_scale, offset, out, bits, 4, 1, size, ways)
        else:
            block(at, pitch, x, count, scales, x_scale, offset, out, bits, 4, 0, size, ways)
        return 4
    if left >= 2:
        if first:
            block(at, pitch, x, count, scales, x_scale, offset, out, bits, 2, 1, size, ways)
        else:
            block(at, pitch, x, count, scales, x_scale, offset, out, bits, 2, 0, size, ways)
        return 2
    if first:
        block(at, pitch, x, count, scales, x_scale, offset, out, bits, 1, 1, size, ways)
    else:
        block(at, pitch, x, count, scales, x_scale, offset, out, bits, 1, 0, size, ways)
    return 1


@_njit
def _rows(given, number, bits, size, ways):
    """The products of the rows of one entry."""
    entry = cpu._array(given[_TABLE] + 8 * _ENTRY * number, (_ENTRY,), np.int64)
    cpu._array(entry[_OUT], (LANES * entry[_GROUPS],), np.float32)[:] = 0
    for n in range(given[_COUNT]):
        columns, scales = entry[_PAYLOAD] + n * given[_BLOCK] * entry[_PITCH], entry[_SCALES] + n * entry[_STRIDE]
        k = 0
        while k < entry[_GROUPS]:
            at, place, out = columns + 2 * len(bits) * k, scales + LANES * len(size) * k, entry[_OUT] + 4 * LANES * k
            k += _some(at, place, out, n, given, entry, k, bits, size, ways)


@cache
def _kernel(bits_: int, size_: int, integers: bool) -> Callable[[int], None]:
    """The kernel of some bits and bytes of a scale; see ``cpu._kernel``."""
    bits, size, ways, stamp = (0,) * bits_, (0,) * size_, (0,) * (1 + integers), _STAMP

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            for number in range(first, last):
                _rows(given, number, bits, size, ways)

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def prepared(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], x: np.ndarray, x_scales: np.ndarray, sums: np.ndarray,
    out: np.ndarray, bits: int, block: int, together: int,
) -> Callable[[], None]:  # fmt: skip
    """A product with matrices that lie below each other, again and again, on what the same memory then holds.

    parts: of each matrix the payload, uint8, with 16 bytes more at its end than are used, and the scales [N, rows],
    fp32 or the bits of bf16; rows a multiple of 16. x: [C], fp32, or int32 of four times the same byte; x_scales: fp32
    [N], times the step of the values; sums: int32 [N], for integers: -510 times the sum of the vector's bytes; out:
    fp32, of all rows. together: groups of 16 rows that one thread works on, at most. All contiguous.
    """
    count, entries, size = len(x_scales), [], parts[0][1].itemsize
    assert all(array.flags.c_contiguous for each in ((x, x_scales, sums, out), *parts) for array in each)
    assert sums.dtype == np.int32 and sum(scales.shape[1] for _, scales in parts) == len(out)
    at = out.ctypes.data
    for payload, scales in parts:
        rows = scales.shape[1]
        assert rows % LANES == 0 and len(scales) == count and scales.itemsize == size
        assert payload.nbytes == rows * count * block * bits // 8 + 16
        for start, end in trellis._runs(rows):
            pitch, begin = (end - start) * bits // 8, payload.ctypes.data + start * count * block * bits // 8
            for first in range(start, end, LANES * together):
                groups = min(end - first, LANES * together) // LANES
                places = begin + (first - start) * bits // 8, pitch, scales.ctypes.data + first * size, rows * size
                entries.append((*places, at + 4 * first, groups, int(first == start)))
        at += 4 * rows
    table, integers = np.array(entries, np.int64), x.dtype == np.int32
    arrays = {_TABLE: table, _X: x, _X_SCALES: x_scales, _SUMS: sums}
    values: dict[int, Any] = {place: array.ctypes.data for place, array in arrays.items()}
    values |= {_BLOCK: block, _COUNT: count, _ENTRIES: len(table), cpu._BLOCKS: cpu._GROUP * len(table)}
    given, kernel, elements = cpu._arguments(values), _kernel(bits, size, integers), len(out) * count * block

    def call() -> None:
        given[cpu._NEXT] = 0
        cpu._run(kernel, given, elements)

    call.given, call.held = given, (arrays, parts, out)  # type: ignore[attr-defined]  # what addresses are of
    return call

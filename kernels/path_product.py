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

ROOM = 16  # bytes that a register reads beside those that are asked for
FACTOR, SUMMAND = 34038481, 76625530  # as in ``tq.infer.trellis``
_LONG, _BYTES16 = ir.IntType(64), ir.VectorType(ir.IntType(8), 16)
_SHORTS16, _SHORT = ir.VectorType(ir.IntType(16), LANES), ir.IntType(16)
# places in the array of int64 that a kernel is called with; the first three are those of ``cpu``
_TABLE, _ENTRIES, _BLOCK, _X, _X_SCALES, _SUMS, _COUNT = 3, 4, 5, 6, 7, 9, 10
# of an entry of the table: some rows of a run that are worked on together
_PAYLOAD, _PITCH, _SCALES, _STRIDE, _OUT, _GROUPS, _FIRST, _BITS = range(8)
_ENTRY = 8
_STAMP = trellis._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")


def _states(code: _Code, bits_at: ir.Value, before: ir.Value | None, bits: int) -> _Vector:
    """Of 16 rows of a column, whose bits lie at an address; before: where the two bytes that precede them lie, None
    where that is just before."""
    b = code.b
    raw = b.load(code.at(bits_at, -2, _BYTES16), align=1)
    if before is not None:
        last = b.load(code.at(before, 0, _SHORT), align=1)
        shorts = b.insert_element(b.bitcast(raw, ir.VectorType(_SHORT, 8)), last, ir.Constant(_INT, 0))
        raw = b.bitcast(shorts, _BYTES16)
    places, shifts = [], []
    for lane in range(LANES):
        stop = 16 + (lane + 1) * bits
        first = (stop - trellis.LENGTH) // 8
        shifts.append(32 - (stop - 8 * first))
        places.extend(first + k for k in (3, 2, 1, 0))
    undefined, order = ir.Constant(_BYTES16, ir.Undefined), ir.Constant(ir.VectorType(_INT, 64), places)
    words = b.lshr(b.bitcast(b.shuffle_vector(raw, undefined, order), _INTS), ir.Constant(_INTS, shifts))
    return _Vector(code, words) & ((1 << trellis.LENGTH) - 1)


def _hashed(code: _Code, states: _Vector) -> _Vector:
    """Words whose bytes add up to the values of states."""
    b = code.b
    product = b.mul(states.value, code.constant(FACTOR, _INTS))
    return _Vector(code, b.add(product, code.constant(SUMMAND, _INTS)))


def _times(code: _Code, sums: _Vector, bytes_: _Vector, factor: _Vector) -> _Vector:
    """sums plus the four bytes of each lane times a signed one, which each lane of ``factor`` holds four times."""
    b = code.b
    if not code.dot_products:
        return sums + _Vector(code, b.mul(_total(code, bytes_).value, b.ashr(factor.value, code.constant(24, _INTS))))
    product = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_INTS, [_INTS, _INTS, _INTS]), "llvm.x86.avx512.vpdpbusd.512"
    )
    return _Vector(code, b.call(product, [sums.value, bytes_.value, factor.value]))


def _total(code: _Code, hashed: _Vector) -> _Vector:
    """The sum of the four bytes of each lane."""
    if code.dot_products:
        return _times(code, code.vector(0, _INTS), hashed, code.vector(0x01010101, _INTS))
    pairs = (hashed & 0x00FF00FF) + ((hashed >> 8) & 0x00FF00FF)
    return (pairs + (pairs >> 16)) & 0xFFFF


def _scales(code: _Code, address: ir.Value, group: int, size: int) -> _Vector:
    if size == 4:
        return code.load(address, 4 * LANES * group)
    shorts = code.b.load(code.at(address, 2 * LANES * group, _SHORTS16), align=1)
    return (_Vector(code, code.b.zext(shorts, _INTS)) << 16).floats()


@_codelet("bits", "groups", "size", "ways")
def block(code, columns, pitch, x, count, scales, x_scale, offset, out, first, bits, groups, size, ways):
    """Adds what one block of columns gives to 16 rows times ``groups``.

    columns: where these rows' bits of the block's first column lie; pitch: bytes of a column; x: ``count`` words, fp32
    or four times the same byte; scales: of these rows; x_scale: fp32; offset: int32, what the mean adds in integers;
    out: fp32, of these rows; first: 1 where they are the first of a run, which follow its last ones, else 0; ways: 1
    in fp32, 2 in integers.
    """
    b, integers = code.b, ways == 2
    start = code.splat(b.trunc(offset, _INT)).value if integers else code.constant(0.0)
    sums = [cgutils.alloca_once_value(b, start) for _ in range(groups)]
    for place in sums:
        b.store(start, place)
    two = ir.Constant(_LONG, 2)
    back = b.select(b.icmp_signed("!=", first, ir.Constant(_LONG, 0)), b.sub(pitch, two), b.neg(two))
    mean = code.vector(-510 & 0xFFFFFFFF, _INTS)
    with cgutils.for_range(b, count, intp=_LONG) as loop:
        column = b.add(columns, b.mul(pitch, loop.index))
        factor = code.splat(b.load(code.at(x, code.times(loop.index, 4), _INT), align=1))
        for k, place in enumerate(sums):
            bits_at = b.add(column, ir.Constant(_LONG, 2 * bits * k))
            hashed = _hashed(code, _states(code, bits_at, None if k else b.add(column, back), bits))
            held = _Vector(code, b.load(place))
            if integers:
                found = _times(code, held, hashed, factor)
            else:
                value = _Vector(code, b.sitofp((_total(code, hashed) + mean).value, _FLOATS))
                found = code.fma(value, factor.floats(), held)
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
    left, first = entry[_GROUPS] - k, np.int64(entry[_FIRST] == 1 and k == 0)
    if left >= 4:
        block(at, pitch, x, count, scales, x_scale, offset, out, first, bits, 4, size, ways)
        return 4
    if left >= 2:
        block(at, pitch, x, count, scales, x_scale, offset, out, first, bits, 2, size, ways)
        return 2
    block(at, pitch, x, count, scales, x_scale, offset, out, first, bits, 1, size, ways)
    return 1


@_njit
def _rows(given, number, widths, size, ways):
    """The products of the rows of one entry, of as many bits as one of four numbers, told by lengths."""
    entry = cpu._array(given[_TABLE] + 8 * _ENTRY * number, (_ENTRY,), np.int64)
    cpu._array(entry[_OUT], (LANES * entry[_GROUPS],), np.float32)[:] = 0
    if entry[_BITS] == len(widths[0]):
        _rows_of(given, entry, widths[0], size, ways)
    elif entry[_BITS] == len(widths[1]):
        _rows_of(given, entry, widths[1], size, ways)
    elif entry[_BITS] == len(widths[2]):
        _rows_of(given, entry, widths[2], size, ways)
    else:
        _rows_of(given, entry, widths[3], size, ways)


@_njit
def _rows_of(given, entry, bits, size, ways):
    for n in range(given[_COUNT]):
        columns, scales = entry[_PAYLOAD] + n * given[_BLOCK] * entry[_PITCH], entry[_SCALES] + n * entry[_STRIDE]
        k = 0
        while k < entry[_GROUPS]:
            at, place, out = columns + 2 * len(bits) * k, scales + LANES * len(size) * k, entry[_OUT] + 4 * LANES * k
            k += _some(at, place, out, n, given, entry, k, bits, size, ways)


def lengths(bits: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Numbers of bits, at most four, as four lengths of tuples: what compiled code is made for."""
    kinds = [(0,) * each for each in sorted(set(bits))]
    assert len(kinds) <= 4
    return (*kinds, *kinds[:1] * (4 - len(kinds)))


@cache
def _kernel(bits_: tuple[int, ...], size_: int, integers: bool) -> Callable[[int], None]:
    """The kernel of some numbers of bits and bytes of a scale; see ``cpu._kernel``."""
    widths, size, ways, stamp = lengths(bits_), (0,) * size_, (0,) * (1 + integers), _STAMP

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            for number in range(first, last):
                _rows(given, number, widths, size, ways)

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def prepared(
    parts: Sequence[tuple[np.ndarray, np.ndarray, int]], x: np.ndarray, x_scales: np.ndarray, sums: np.ndarray,
    out: np.ndarray, block: int, together: int,
) -> Callable[[], None]:  # fmt: skip
    """A product with matrices that lie below each other, again and again, on what the same memory then holds.

    parts: of each matrix the payload, uint8, with ``ROOM`` bytes more at either end than are used, the scales
    [N, rows], fp32 or the bits of bf16, and the bits of a weight; rows a multiple of 16. x: [C], fp32, or int32 of four
    times the same byte; x_scales: fp32 [N], times the step of the values; sums: int32 [N], for integers: -510 times the
    sum of the vector's bytes; out: fp32, of all rows. together: groups of 16 rows that one thread works on, at most.
    All contiguous.
    """
    count, entries, size = len(x_scales), [], parts[0][1].itemsize
    assert all(array.flags.c_contiguous for each in ((x, x_scales, sums, out), *parts) for array in each[:2])
    assert sums.dtype == np.int32 and sum(scales.shape[1] for _, scales, _ in parts) == len(out)
    at = out.ctypes.data
    for payload, scales, bits in parts:
        rows = scales.shape[1]
        assert rows % LANES == 0 and len(scales) == count and scales.itemsize == size
        assert payload.nbytes == rows * count * block * bits // 8 + 2 * ROOM
        for start, end in trellis._runs(rows):
            pitch, begin = (end - start) * bits // 8, payload.ctypes.data + ROOM + start * count * block * bits // 8
            for first in range(start, end, LANES * together):
                groups = min(end - first, LANES * together) // LANES
                places = begin + (first - start) * bits // 8, pitch, scales.ctypes.data + first * size, rows * size
                entries.append((*places, at + 4 * first, groups, int(first == start), bits))
        at += 4 * rows
    table, integers = np.array(entries, np.int64), x.dtype == np.int32
    arrays = {_TABLE: table, _X: x, _X_SCALES: x_scales, _SUMS: sums}
    values: dict[int, Any] = {place: array.ctypes.data for place, array in arrays.items()}
    values |= {_BLOCK: block, _COUNT: count, _ENTRIES: len(table), cpu._BLOCKS: cpu._GROUP * len(table)}
    widths = tuple(sorted({bits for *_, bits in parts}))
    given, elements = cpu._arguments(values), len(out) * count * block

    def call() -> None:
        given[cpu._NEXT] = 0
        cpu._run(_kernel(widths, size, integers), given, elements)  # a decoder never calls it, and compiles none

    call.given, call.held = given, (arrays, parts, out)  # type: ignore[attr-defined]  # what addresses are of
    return call

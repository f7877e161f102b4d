"""Numba kernels of products with weights that are paths through a trellis: a matrix of few bits times a vector.

A register holds 16 rows of one column. Their bits lie side by side; every lane takes the 14 bits that end with its own,
which are its state, and computes the value from it: times a constant, plus one, and the sum of the four bytes. One
instruction (VNNI) adds up four bytes that are multiplied, so that in integers the sum need not be formed first.

Shapes: O rows, a multiple of 16; C columns, a multiple of the block; N blocks of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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
_PAYLOAD, _SCALES, _BLOCK, _X, _X_SCALES, _SUMS, _OUT, _COUNT, _ROWS, _RUNS = 3, 4, 5, 6, 7, 9, 10, 11, 12, 13
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
def _block(given, columns, pitch, n, scales, out, groups, bits, size, ways):
    """One block of columns for all groups of a run, four together."""
    x, count = given[_X] + 4 * n * given[_BLOCK], given[_BLOCK]
    x_scale = cpu._array(given[_X_SCALES], (given[_COUNT],), np.float32)[n]
    offset = cpu._array(given[_SUMS], (given[_COUNT],), np.int64)[n]
    if groups < 4:
        for k in range(groups):
            at, place, target = columns + k * 2 * len(bits), scales + k * LANES * len(size), out + k * 4 * LANES
            if k:
                block(at, pitch, x, count, place, x_scale, offset, target, bits, 1, 0, size, ways)
            else:
                block(at, pitch, x, count, place, x_scale, offset, target, bits, 1, 1, size, ways)
        return
    block(columns, pitch, x, count, scales, x_scale, offset, out, bits, 4, 1, size, ways)
    k = 4
    while k < groups:
        at, place, target = columns + k * 2 * len(bits), scales + k * LANES * len(size), out + k * 4 * LANES
        if k + 4 <= groups:
            block(at, pitch, x, count, place, x_scale, offset, target, bits, 4, 0, size, ways)
            k += 4
        elif k + 2 <= groups:
            block(at, pitch, x, count, place, x_scale, offset, target, bits, 2, 0, size, ways)
            k += 2
        else:
            block(at, pitch, x, count, place, x_scale, offset, target, bits, 1, 0, size, ways)
            k += 1


@cache
def _kernel(bits_: int, size_: int, integers: bool) -> Callable[[int], None]:
    """The kernel of some bits and bytes of a scale; see ``cpu._kernel``."""
    bits, size, ways, stamp = (0,) * bits_, (0,) * size_, (0,) * (1 + integers), _STAMP

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        rows, runs, count = given[_ROWS], given[_RUNS], given[_COUNT]
        out = cpu._array(given[_OUT], (rows,), np.float32)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            for run in range(first, last):
                start, end = trellis.edge(rows, runs, run), trellis.edge(rows, runs, run + 1)
                pitch = (end - start) * bits_ // 8
                payload = given[_PAYLOAD] + start * count * given[_BLOCK] * bits_ // 8
                out[start:end] = 0
                for n in range(count):
                    columns, scales = payload + n * given[_BLOCK] * pitch, given[_SCALES] + (n * rows + start) * size_
                    place, groups = given[_OUT] + 4 * start, (end - start) // LANES
                    _block(given, columns, pitch, n, scales, place, groups, bits, size, ways)

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def prepared(
    payload: np.ndarray, scales_NO: np.ndarray, x: np.ndarray, x_scales: np.ndarray, sums: np.ndarray, out: np.ndarray,
    bits: int, block: int, size: int,
) -> Callable[[], None]:  # fmt: skip
    """A product as a call, again and again, on what the same memory then holds.

    payload: uint8, with 16 bytes more at its end than are used; scales_NO: [N, O], fp32 or the bits of bf16, ``size``
    bytes each; x: [C], fp32, or int32 of four times the same byte; x_scales: fp32 [N], times the step of the values;
    sums: int64 [N], for integers: -510 times the sum of the vector's bytes; out: fp32 [O]. All contiguous.
    """
    rows, count = len(out), len(x_scales)
    integers = x.dtype == np.int32
    arrays = {_PAYLOAD: payload, _SCALES: scales_NO, _X: x, _X_SCALES: x_scales, _SUMS: sums, _OUT: out}
    assert all(array.flags.c_contiguous for array in arrays.values()) and rows % LANES == 0
    assert payload.nbytes == rows * count * block * bits // 8 + 16 and scales_NO.size == count * rows
    runs = trellis.runs_of(rows)
    values: dict[int, Any] = {place: array.ctypes.data for place, array in arrays.items()}
    values |= {_BLOCK: block, _COUNT: count, _ROWS: rows, _RUNS: runs, cpu._BLOCKS: cpu._GROUP * runs}
    given, kernel = cpu._arguments(values), _kernel(bits, size, integers)

    def call() -> None:
        given[cpu._NEXT] = 0
        cpu._run(kernel, given, rows * count * block)

    call.held = arrays  # type: ignore[attr-defined]  # what the addresses are of
    return call

"""All blocks of a decoder for one token, in one call: threads go from phase to phase without Python between them.

A phase is a norm, a product, an attention; products are those of ``matvec`` or of ``path_product``. Threads take the
pieces of a phase until none is left, and wait until all are done: any number of threads comes through, also one alone.

Shapes: I, O of a product; K key/value heads, D head size, T' places of the caches.
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
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import cpu, matvec, path_product, token
from .simd import _codelet, take_next

PHASES, PIECES = 9, 8  # of a block; of a product
# places in the array of int64 that the kernel is called with
_ROWS_AT, _LAYERS, _COUNTERS, _STREAM, _WIDTH, _COS, _SIN, _AT, _LENGTH, _HEADS, _SIZE, _LANES, _STEP, _EPS, _BLOCK = (
    3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18,
)  # fmt: skip
_ROUNDS = 19
# of a row of the table, one for each block: addresses, then those of its four products
_MORE, _FIRST_NORM, _SECOND_NORM, _KEYS, _VALUES, _PRODUCTS = range(6)
_X, _SIGNS, _EXACT, _WHOLE, _SCALES, _SUMS, _Y, _ARGUMENTS, _COLUMNS, _OUTPUTS, _OF_PRODUCT = range(11)
_ROW = _PRODUCTS + 4 * _OF_PRODUCT
_STAMP = matvec._STAMP ^ path_product._STAMP ^ int(
    hashlib.blake2b(b"".join(Path(m).read_bytes() for m in (__file__, token.__file__)), digest_size=6).hexdigest(), 16
)
_njit = numba.njit(error_model="numpy")


@intrinsic
def _finish(typingctx, counter):
    """One more at an address, after all that was written before it."""

    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _reached(typingctx, counter):
    """The int64 at an address; what is read after it is what was written before it was."""

    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), codegen


@_codelet()
def _rest(code):
    """Lets the other thread of a core run, where the processor has an instruction for it."""
    if code.wide_permutes or code.permutes:
        type_ = ir.FunctionType(ir.VoidType(), [])
        code.b.call(cgutils.get_or_insert_function(code.b.module, type_, "llvm.x86.sse2.pause"), [])


@_njit
def _floats(address, size):
    return cpu._array(address, (size,), np.float32)


@_njit
def _turned(given, row, number):
    """A product's vector, rotated in place; the step of its levels."""
    at = _PRODUCTS + _OF_PRODUCT * number
    x = _floats(row[at + _X], row[at + _COLUMNS])
    token._turned(x, cpu._array(row[at + _SIGNS], (given[_ROUNDS], given[_BLOCK]), np.float32))
    return x, np.float32(given[_STEP : _STEP + 1].view(np.float64)[0])


@_njit
def _give_codes(given, row, number, ways):
    """A product's vector, as ``matvec`` reads it."""
    at, block, (x, step) = _PRODUCTS + _OF_PRODUCT * number, given[_BLOCK], _turned(given, row, number)
    if len(ways) == 1:
        token._laid_out(x, given[_LANES], _floats(row[at + _EXACT], x.size))
    else:
        blocks = x.size // block
        whole, sums = cpu._array(row[at + _WHOLE], (x.size,), np.int8), (blocks, 16)
        token._whole(x, block, given[_LANES], step, whole, _floats(row[at + _SCALES], blocks),
                     cpu._array(row[at + _SUMS], sums, np.int32))  # fmt: skip


@_njit
def _give_paths(given, row, number, ways):
    """A product's vector, as ``path_product`` reads it."""
    at, block, (x, step) = _PRODUCTS + _OF_PRODUCT * number, given[_BLOCK], _turned(given, row, number)
    if len(ways) == 1:
        _floats(row[at + _EXACT], x.size)[:] = x
    else:
        blocks, words = x.size // block, cpu._array(row[at + _WHOLE], (x.size,), np.int32)
        sums = cpu._array(row[at + _SUMS], (blocks,), np.int32)
        token._words(x, block, step, words, _floats(row[at + _SCALES], blocks), sums)


@_njit
def _norm(given, row, more, weight, number):
    at, width = _PRODUCTS + _OF_PRODUCT * number, given[_WIDTH]
    eps = given[_EPS : _EPS + 1].view(np.float64)[0]
    token.add_and_norm(
        _floats(given[_STREAM], width), _floats(more, width), _floats(weight, width), eps, _floats(row[at + _X], width)
    )


@_njit
def _attend(given, row, piece):
    heads, length, size = given[_HEADS], given[_LENGTH], given[_SIZE]
    first, second = _PRODUCTS, _PRODUCTS + _OF_PRODUCT
    shape, half = (heads, length, size), size // 2
    token.attend_group(
        _floats(row[first + _Y], row[first + _OUTPUTS]), _floats(given[_COS], half), _floats(given[_SIN], half),
        cpu._array(row[_KEYS], shape, np.float32), cpu._array(row[_VALUES], shape, np.float32), given[_AT],
        _floats(row[second + _X], row[second + _COLUMNS]), piece,
    )  # fmt: skip


@_njit
def _multiply_codes(row, number, piece, bits, rows, runs, size, ways):
    """A share of a product's rows."""
    at, one = _PRODUCTS + _OF_PRODUCT * number, (0,)
    given, outputs = cpu._array(row[at + _ARGUMENTS], (cpu._FIELDS,), np.int64), row[at + _OUTPUTS]
    together = len(rows)
    groups = (outputs + together - 1) // together
    r, end = groups * piece // PIECES * together, min(groups * (piece + 1) // PIECES * together, outputs)
    while r < end:
        if r + together <= end:
            if len(ways) == 1:
                matvec._exact(given, r, bits, rows, one, runs, size)
            else:
                matvec._rounded(given, r, bits, rows, one, runs, size)
            r += together
        else:
            if len(ways) == 1:
                matvec._exact(given, r, bits, one, one, runs, size)
            else:
                matvec._rounded(given, r, bits, one, one, runs, size)
            r += 1


@_njit
def _multiply_paths(row, number, piece, widths, rows, runs, size, ways):
    """Likewise."""
    at = _PRODUCTS + _OF_PRODUCT * number
    path_product._rows(cpu._array(row[at + _ARGUMENTS], (cpu._FIELDS,), np.int64), piece, widths, size, ways)


@_njit
def _pieces_of_codes(row, number):
    return PIECES


@_njit
def _pieces_of_paths(row, number):
    at = _PRODUCTS + _OF_PRODUCT * number
    return cpu._array(row[at + _ARGUMENTS], (cpu._FIELDS,), np.int64)[path_product._ENTRIES]


@_njit
def _between(given, row, phase, piece):
    """What is done between products; the number of the product whose vector is then complete, or -1."""
    if phase == 0:
        _norm(given, row, row[_MORE], row[_FIRST_NORM], 0)
        return 0
    if phase == 2:
        _attend(given, row, piece)
        return -1
    if phase == 3:
        return 1
    if phase == 5:
        _norm(given, row, row[_PRODUCTS + _OF_PRODUCT + _Y], row[_SECOND_NORM], 2)
        return 2
    third, fourth = _PRODUCTS + 2 * _OF_PRODUCT, _PRODUCTS + 3 * _OF_PRODUCT
    width = row[fourth + _COLUMNS]
    token.silu_gate(_floats(row[third + _Y], 2 * width), _floats(row[fourth + _X], width))
    return 3


@cache
def _kernel(
    bits_: int | tuple[int, ...], runs_: int, size_: int, integers: bool, paths: bool
) -> Callable[[int], None]:
    """The kernel of bits, of paths any of several, runs of 64 in a block, bytes of a scale, and kind of products."""
    bits: Any = path_product.lengths(bits_) if isinstance(bits_, tuple) else (0,) * bits_
    runs, size, stamp = (0,) * runs_, (0,) * size_, _STAMP
    rows, ways = (0,) * matvec.rows_together(1), (0,) * (2 if integers else 1)
    give, multiply, parts = _give_codes, _multiply_codes, _pieces_of_codes
    if paths:
        give, multiply, parts = _give_paths, _multiply_paths, _pieces_of_paths

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        layer = 0
        while stamp and layer < given[_LAYERS]:
            row = cpu._array(given[_ROWS_AT] + 8 * _ROW * layer, (_ROW,), np.int64)
            for phase in range(PHASES):
                product = phase // 2 - (phase > 1) if phase in (1, 4, 6, 8) else -1
                pieces = parts(row, product) if product >= 0 else given[_HEADS] if phase == 2 else 1
                counter = given[_COUNTERS] + 16 * (layer * PHASES + phase)
                piece = take_next(counter)
                while piece < pieces:
                    if product >= 0:
                        multiply(row, product, piece, bits, rows, runs, size, ways)
                    else:
                        ready = _between(given, row, phase, piece)
                        if ready >= 0:
                            give(given, row, ready, ways)
                    _finish(counter + 8)
                    piece = take_next(counter)
                while _reached(counter + 8) < pieces:
                    _rest()
            layer += 1

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


class Blocks:
    """What a step is called with: where everything lies that it reads and writes.

    Args:
        rows: of each block: the two norms' weights, keys, values (fp32 [K, T', D]), and the four products, each as
            (x, signs, exact, whole, scales, sums, y, arguments), as ``matvec`` and ``token`` take them.
        tables: cosines and sines, fp32 [T', D / 2].
        stream: fp32 [C].
        settings: (bits, bytes of a scale, lanes, step, eps), of all products; lanes: 0 where they are of paths, with or
            without integers, whose bits are those that any of them has.
    """

    def __init__(
        self, rows: Sequence[tuple[list[np.ndarray], np.ndarray, np.ndarray, list[tuple[np.ndarray, ...]]]],
        tables: tuple[np.ndarray, np.ndarray], stream: np.ndarray,
        settings: tuple[int | tuple[int, ...], int, int, float, float],
    ) -> None:  # fmt: skip
        bits, size, lanes, step, eps = settings
        heads, length, head = rows[0][1].shape
        signs = rows[0][3][0][1]
        self._tables, self._counters = tables, np.zeros((len(rows), PHASES, 2), np.int64)
        nothing, table = np.zeros_like(stream), np.zeros((len(rows), _ROW), np.int64)
        for number, (norms, keys, values, products) in enumerate(rows):
            more = rows[number - 1][3][3][6] if number else nothing
            table[number, :_PRODUCTS] = [each.ctypes.data for each in (more, *norms, keys, values)]
            for k, product in enumerate(products):
                at = _PRODUCTS + _OF_PRODUCT * k
                table[number, at : at + _COLUMNS] = [each.ctypes.data for each in product]
                table[number, at + _COLUMNS : at + _OF_PRODUCT] = product[0].size, product[6].size
        values_: dict[int, Any] = {
            _ROWS_AT: table.ctypes.data, _LAYERS: len(rows), _COUNTERS: self._counters.ctypes.data,
            _STREAM: stream.ctypes.data, _WIDTH: stream.size, _LENGTH: length, _HEADS: heads, _SIZE: head,
            _LANES: lanes, _STEP: float(step), _EPS: float(eps), _BLOCK: signs.shape[1], _ROUNDS: len(signs),
            cpu._BLOCKS: cpu._GROUP * PIECES,
        }  # fmt: skip
        self._given, self._held = cpu._arguments(values_), (rows, table, nothing, stream)
        integers, paths = not rows[0][3][0][2].size, lanes == 0  # without a vector of fp32 it is one of integers
        self._kernel = _kernel(bits, signs.shape[1] // matvec.RUN, size, integers, paths)

    def run(self, at: int) -> None:
        """The token at place ``at``: the stream goes through all blocks, but for what the last one adds."""
        self._counters[:] = 0
        for place, table in zip((_COS, _SIN), self._tables, strict=True):
            self._given[place] = table.ctypes.data + at * table.strides[0]
        self._given[_AT] = at
        cpu._run(self._kernel, self._given, 1 << 30)

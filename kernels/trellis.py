"""Numba kernel of trellis-coded quantization inside GPTQ: the columns of one block in turn, runs of rows by Viterbi.

A run of rows in one column is a path through a shift register of ``LENGTH`` bits: each weight shifts ``bits`` new ones
in, and what the register then holds is the number of its value. The path with the least squared error is found by the
Viterbi algorithm; it ends where it began (tail-biting), so the register's start costs no bits: a short pass over both
ends of the run finds that state, the pass over the whole run keeps to it.

Errors count by the square of a row's scale over the largest of its run, but for at least ``LEAST`` of it: a sum in fp32
has no digits for rows that are quieter by thousands. The number that a step compares is a sum of squares whose lowest
bits are replaced by the predecessor's number, so that the least of them says where it came from; that is a part in
2**19 of it at 4 bits.

Shapes: O rows, B block size, S = 2**LENGTH states, K = 2**bits branches, R = S / K, Q = R / K.
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
from .simd import _INTS, LANES, _Code, _codelet, _Vector

LENGTH = 14  # bits of the register
RUN = 256  # rows of one path, at most
AROUND = 64  # rows on either side of a run's ends from which the state there is found
LEAST = np.float32(0.03)  # of the largest scale of a run
# places in the array of int64 that a kernel is called with; the first three are those of ``cpu``
_W, _U, _BLOCK, _SCALES, _VALUES, _STATES, _ERROR, _ROWS, _RUNS = 3, 4, 5, 6, 7, 9, 10, 11, 12
_STAMP = cpu._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy", fastmath={"contract", "nsz"})
_LONG, _BYTES16 = ir.IntType(64), ir.VectorType(ir.IntType(8), LANES)
_FAR = np.float32(1e30)


@_codelet("bits")
def advance(code, x, scale, values, least, after, came, bits):
    """One weight's worth of the search: the least costs of what the register keeps, and where each came from.

    x, scale: fp32; values: of the states, a branch's side by side; least: fp32 [R], costs before the weight; after:
    fp32 [R], where the costs after it go; came: uint8 [R], the numbers of the predecessors, in the order [K, Q].
    """
    b, branches = code.b, 1 << bits
    before = (1 << LENGTH) // branches
    part = before // branches
    x, down = code.splat(x), code.splat(b.fneg(scale))
    keep = ~(branches - 1) & 0xFFFFFFFF
    with cgutils.for_range(b, ir.Constant(_LONG, part // LANES), intp=_LONG) as loop:
        here, found = code.times(loop.index, 4 * LANES), []
        for c in range(branches):
            best = None
            for p in range(branches):
                place = 4 * p * part
                value = code.load(values, b.add(here, ir.Constant(_LONG, 4 * c * before + place)))
                error = code.fma(down, value, x)
                cost = code.fma(error, error, code.load(least, b.add(here, ir.Constant(_LONG, place))))
                number = (cost.ints() & keep) | code.vector(p, _INTS)
                best = number if best is None else code.call("llvm.smin.v16i32", best, number)
            bytes_ = b.trunc((best & (branches - 1)).value, _BYTES16)
            code.store(_Vector(code, bytes_), came, b.add(code.times(loop.index, LANES), ir.Constant(_LONG, c * part)))
            found.append(best & keep)
        for k, vector in enumerate(_interleaved(code, found)):
            code.store(vector, after, b.add(code.times(here, branches), ir.Constant(_LONG, 4 * LANES * k)))


def _interleaved(code: _Code, vectors: list[_Vector]) -> list[_Vector]:
    """The first lanes of all vectors, then the second ones, and so on."""
    half, low, high = len(vectors) // 2, [], []
    for lane in range(LANES):
        (low if lane < LANES // 2 else high).extend((lane, lane + LANES))
    for _ in range(len(vectors).bit_length() - 1):
        pairs = list(zip(vectors[:half], vectors[half:], strict=True))
        vectors = [code.shuffle(a, b, lanes) for a, b in pairs for lanes in (low, high)]
    return vectors


@_njit
def _costs(x, scale, values, least, costs, bits):
    """Costs of all states after one weight."""
    branches = 1 << len(bits)
    before = (1 << LENGTH) // branches
    for c in range(branches):
        mine, value = costs[c * before : (c + 1) * before], values[c * before : (c + 1) * before]
        for r in range(before):
            error = x - scale * value[r]
            mine[r] = least[r] + error * error


@_njit
def _end(costs, bits, start):
    """The state of the least cost; among those that lead to ``start`` where that is not negative."""
    branches = 1 << len(bits)
    before = (1 << LENGTH) // branches
    best, found = _FAR, 0
    if start >= 0:
        for p in range(branches):
            state = p * before + start
            cost = costs[(state & (branches - 1)) * before + (state >> len(bits))]
            if cost < best:
                best, found = cost, state
        return found
    for c in range(branches):
        for r in range(before):
            if costs[c * before + r] < best:
                best, found = costs[c * before + r], r * branches + c
    return found


@_njit
def _path(x, scale, first, count, values, room, came, states, start, bits):
    """The states of the best path over ``count`` of the numbers from ``first`` on, which go on from the start again.

    start: what of the register's bits stays at the beginning and at the end; negative where both are free.
    """
    branches = 1 << len(bits)
    before, rows = (1 << LENGTH) // branches, len(x)
    part = before // branches
    costs, least = room[: 1 << LENGTH], room[1 << LENGTH :][: 2 * before].reshape(2, before)
    least[0] = np.float32(0) if start < 0 else _FAR
    if start >= 0:
        least[0, start] = 0
    for t in range(count - 1):
        at = (first + t) % rows
        advance(
            x[at], scale[at], cpu._address(values), cpu._address(least[t % 2]), cpu._address(least[(t + 1) % 2]),
            cpu._address(came[t + 1]), bits,
        )  # fmt: skip
    at = (first + count - 1) % rows
    _costs(x[at], scale[at], values, least[(count - 1) % 2], costs, bits)
    state = _end(costs, bits, start)
    for t in range(count - 1, -1, -1):
        states[t] = state
        if t:
            after = state >> len(bits)
            state = np.int64(came[t, (after & (branches - 1)) * part + (after >> len(bits))]) * before + after


@_njit
def _column(x, scale, values, room, came, states, bits):
    """The states of a run of rows, which end as they began."""
    rows, before = len(x), (1 << LENGTH) >> len(bits)
    around = min(AROUND, rows // 2)
    _path(x, scale, rows - around, 2 * around, values, room, came, states, -1, bits)
    start = np.int64(states[around - 1]) & (before - 1)
    _path(x, scale, 0, rows, values, room, came, states, start, bits)


@_njit
def _block(given, run, room, came, bits):
    """One run of rows through all columns of the block."""
    block, rows, runs = given[_BLOCK], given[_ROWS], given[_RUNS]
    first, last = edge(rows, runs, run), edge(rows, runs, run + 1)
    count, branches = last - first, 1 << len(bits)
    u = cpu._array(given[_U], (block, block), np.float32)
    w = cpu._array(given[_W], (block, rows), np.float32)
    error = cpu._array(given[_ERROR], (block, rows), np.float32)
    states = cpu._array(given[_STATES], (block, rows), np.uint16)
    scale = cpu._array(given[_SCALES], (rows,), np.float32)[first:last]
    values = cpu._array(given[_VALUES], (1 << LENGTH,), np.float32)
    before = (1 << LENGTH) // branches
    x, scaled, weight = np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.float32)
    largest = np.max(scale)
    for r in range(count):
        weight[r] = max(scale[r] / largest, LEAST)
    for j in range(block):
        x[:] = w[j, first:last]
        for i in range(j):
            moved = u[j, i]
            for r in range(count):
                x[r] -= moved * error[i, first + r]
        found = states[j, first:last]
        for r in range(count):
            scaled[r] = x[r] / scale[r] * weight[r]
        _column(scaled, weight, values, room, came, found, bits)
        inverse = np.float32(1) / u[j, j]
        for r in range(count):
            state = np.int64(found[r])
            value = values[(state & (branches - 1)) * before + (state >> len(bits))]
            error[j, first + r] = (x[r] - scale[r] * value) * inverse


@_njit
def edge(rows, runs, run):
    """Where a run of rows begins: runs are multiples of 16 rows, as equal as can be."""
    return rows // LANES * run // runs * LANES


@cache
def _kernel(bits_: int) -> Callable[[int], None]:
    """The kernel of a number of bits; see ``cpu._kernel``."""
    bits, stamp = (0,) * bits_, _STAMP
    before = (1 << LENGTH) >> bits_

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        room, came = cpu._scratch((1 << LENGTH) + 2 * before), np.empty((RUN, before), np.uint8)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            for run in range(first, last):
                _block(given, run, room, came, bits)
        cpu._hold((room, came))

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def runs_of(rows: int) -> int:
    """Runs that so many rows, a multiple of 16, are divided into."""
    return -(-rows // RUN)


def round_block(
    w: np.ndarray, scale: np.ndarray, u: np.ndarray, values: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """(states uint16 [B, O], errors fp32 [B, O]) of a block of columns.

    w: fp32 [B, O], a column in a row, O a multiple of 16; scale: fp32 [O], positive; u: fp32 [B, B]: at
    [j, i], what column j takes over of column i before it, for an error in units of u[i, i]; values: fp32 [S], of the
    states. All contiguous.
    """
    block, rows = w.shape
    assert rows % LANES == 0 and scale.shape == (rows,) and u.shape == (block, block) and values.size == 1 << LENGTH
    assert all(x.dtype == np.float32 and x.flags.c_contiguous for x in (w, scale, u, values))
    states, error = np.empty((block, rows), np.uint16), np.empty((block, rows), np.float32)
    ordered = np.ascontiguousarray(values.reshape(-1, 1 << bits).T)  # a branch's values lie side by side
    arrays = {_W: w, _U: u, _SCALES: scale, _VALUES: ordered, _STATES: states, _ERROR: error}
    given = {place: array.ctypes.data for place, array in arrays.items()}
    given |= {_BLOCK: block, _ROWS: rows, _RUNS: runs_of(rows), cpu._BLOCKS: cpu._GROUP * runs_of(rows)}
    cpu._run(_kernel(bits), cpu._arguments(given), rows * block << LENGTH)
    return states, error


def pack(states: np.ndarray, bits: int) -> np.ndarray:
    """The bits that paths shift in, uint8 [P * C * bits / 8], of states uint16 [C, P]; see ``tq.infer.trellis``."""
    columns, rows = states.shape
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint16)
    parts = []
    for first, last in _runs(rows):
        each = (states[:, first:last, None] >> shifts & 1).astype(np.uint8)
        parts.append(np.packbits(each.reshape(columns, -1), axis=1).reshape(-1))
    return np.concatenate(parts)


def unpack(payload: np.ndarray, bits: int, rows: int, columns: int) -> np.ndarray:
    """States uint16 [C, P], the inverse of ``pack``."""
    states = np.empty((columns, rows), np.uint16)
    for first, last in _runs(rows):
        here = payload[first * columns * bits // 8 : last * columns * bits // 8].reshape(columns, -1)
        _states(here, states[:, first:last], bits)
    return states


def _runs(rows: int) -> list[tuple[int, int]]:
    count = runs_of(rows)
    return [(edge(rows, count, run), edge(rows, count, run + 1)) for run in range(count)]


@numba.njit(cache=True)
def _states(payload, states, bits):
    """What the register holds at each row: payload uint8 [C, rows * bits / 8], states uint16 [C, rows]."""
    columns, rows = states.shape
    keep, low = (1 << LENGTH) - 1, (1 << bits) - 1
    for c in range(columns):
        line, state = payload[c], 0
        for t in range(-LENGTH, rows):  # those before the first row are the last ones
            at = t % rows * bits
            two = np.int64(line[at // 8]) << 8
            if at // 8 + 1 < len(line):
                two |= np.int64(line[at // 8 + 1])
            state = (state << bits | (two >> (16 - bits - at % 8)) & low) & keep
            if t >= 0:
                states[c, t] = state

"""Attention of one token straight from coded keys and values: each code is read once, and never un-rotated.

Scores come from the rotated query, as in ``matvec``. Values are summed in their rotated domain, level times share, and
only the sum is rotated back. Pages of tokens are worked on apart, each with a maximum and a sum of its own, and are
joined at the end, with the first tokens that are kept exact.

Shapes: K key/value heads, V queries of one such head (1 to 4), D head size = block size (64, 128, ...), P pages,
S first tokens.
"""

from __future__ import annotations

import hashlib
import math
import threading
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

from . import cpu, matvec, simd
from .matvec import _LONG, RUN, _fetch, _Indices, _sum
from .simd import _FLOAT, _FLOATS, _INT, _INTS, LANES, _codelet, _Table, _Vector

MOST = 4  # queries of one key/value head
_LEAST, _ROUND = -87.0, 1.5 * 2.0**23  # exp of less is no normal number; added to a small number leaves it rounded
_LN2 = (0.693359375, math.log(2) - 0.693359375)  # few bits, so that a multiple is exact, and the rest
# places in the array of int64 that a kernel is called with; _BLOCKS is that of ``cpu``: what its threads share
_WHERE, _X, _SUMS, _STATS, _LENGTH, _LEVELS, _VALUE_LEVELS, _HEADS, _PAGE = 3, 4, 5, 6, 7, 9, 10, 11, 12
_SIZE, _QUERIES, _Q, _TURN, _BACK, _PAGES, _OUT, _FIRST = 13, 14, 15, 16, 17, 18, 19, 20
# places in the array of int64 about the tokens kept exact and about what is done after the codes
_TURN_PITCH, _BACK_PITCH, _EXACT, _EXACT_KEYS, _EXACT_VALUES, _KEY_MEAN, _VALUE_MEAN = range(7)
_RUNS = RUN // LANES
_STAMP = matvec._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")
_fast = numba.njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


def _scales(code: Any, scales: ir.Value, size: int, count: int) -> _Vector:
    """``count`` scales, again and again in 16 lanes. size: bytes of one, 2 (bf16) or 4."""
    b, short = code.b, size == 2
    raw = b.load(code.at(scales, 0, ir.VectorType(ir.IntType(16) if short else _INT, count)), align=1)
    lanes = ir.Constant(_INTS, [lane % count for lane in range(LANES)])
    spread = b.shuffle_vector(raw, ir.Constant(raw.type, ir.Undefined), lanes)
    whole = _Vector(code, b.zext(spread, _INTS)) << 16 if short else _Vector(code, spread)
    return whole.floats()


def _sums(code: Any, found: list[_Vector]) -> _Vector:
    """In lane i the sum over the lanes of vector i, of 16 vectors."""
    half = LANES // 2
    while half:
        groups = range(0, LANES, 2 * half)
        low = [lane for g in groups for lane in [*range(g, g + half), *range(LANES + g, LANES + g + half)]]
        high = [lane + half for lane in low]
        pairs = zip(found[:half], found[half:], strict=True)
        found = [code.shuffle(a, b, low) + code.shuffle(a, b, high) for a, b in pairs]
        half //= 2
    return found[0]


def together(vectors: int) -> int:
    """Tokens whose scores are worked on together: with all queries they fill the lanes, three as if they were four."""
    return LANES // (4 if vectors == 3 else vectors)


@_codelet("bits", "vectors", "runs", "size")
def score(code, payload, scales, x, out, out_pitch, levels, ahead, bits, vectors, runs, size):
    """Products of ``together(V)`` rows of one block with V vectors. payload, scales: of the first row; x: fp32 [V, B]
    in the order of lanes; out: the first row's place, ``out_pitch`` bytes from one vector to the next; ahead: what is
    wanted soon, as many bytes as the rows have; size: bytes of a scale, 2 (bf16) or 4."""
    b, long, rows = code.b, lambda n: ir.Constant(_LONG, n), together(vectors)
    table, width = _Table(code, levels, LANES, 1 << bits), runs * RUN * bits // 8
    for line in range(0, rows * width, 64):
        _fetch(code, ahead, long(line))
    found = [code.vector(0.0)] * LANES
    for row in range(rows):
        sums: list[Any] = [None] * vectors
        for run in range(runs):
            low = long(row * width + run * RUN * (4 if bits == 4 else 2) // 8)
            high = long(row * width + runs * RUN * 2 // 8 + run * RUN // 8)
            index = _Indices(code, bits, payload, low, high)
            for k in range(4):
                level = table[index[k]]
                for v in range(vectors):
                    value = code.load(x, 4 * (RUN * (runs * v + run) + LANES * k))
                    sums[v] = level * value if sums[v] is None else code.fma(level, value, sums[v])
        for v in range(vectors):
            found[v * rows + row] = sums[v]
    total = _sums(code, found) * _scales(code, scales, size, rows)
    for v in range(vectors):
        lanes = ir.Constant(ir.VectorType(_INT, rows), [v * rows + row for row in range(rows)])
        part = b.shuffle_vector(total.value, ir.Constant(_FLOATS, ir.Undefined), lanes)
        b.store(part, code.at(out, b.mul(out_pitch, long(v)), part.type), align=1)


@_codelet("size")
def weigh(code, shares, scales, count, size):
    """Shares times the scales of their rows, in place; ``count`` of them, a multiple of 16."""
    b, long = code.b, lambda n: ir.Constant(_LONG, n)
    with cgutils.for_range(b, b.udiv(count, long(LANES)), intp=_LONG) as loop:
        place = b.mul(loop.index, long(4 * LANES))
        scale = _scales(code, b.add(scales, b.mul(loop.index, long(size * LANES))), size, LANES)
        code.store(code.load(shares, place) * scale, shares, place)


@_codelet("bits", "vectors", "runs")
def combine(code, payload, weights, pitch, count, out, levels, ahead, bits, vectors, runs):
    """Rows added up with weights. payload: of ``count`` rows of one block; weights: fp32, one a row, ``pitch`` bytes
    from one vector to the next; out: fp32 [V, B] in the order of lanes; ahead: what is wanted soon, as many bytes."""
    b, long = code.b, lambda n: ir.Constant(_LONG, n)
    table, width = _Table(code, levels, LANES, 1 << bits), runs * RUN * bits // 8
    sums = [cgutils.alloca_once_value(b, code.constant(0.0)) for _ in range(vectors * runs * 4)]
    for place in sums:
        b.store(code.constant(0.0), place)
    with cgutils.for_range(b, count, intp=_LONG) as loop:
        row = loop.index
        here = b.mul(long(width), row)
        for line in range(0, width, 64):
            _fetch(code, ahead, b.add(here, long(line)))
        each = []
        for v in range(vectors):
            each.append(code.splat(code.read(weights, b.add(b.mul(pitch, long(v)), b.mul(row, long(4))), _FLOAT)))
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


_together = _njit(together)


@_fast
def _add(total, x, weight):
    for j in range(x.size):
        total[j] += weight * x[j]


@_fast
def _blend(x, a, y, b):
    for j in range(x.size):
        x[j] = a * x[j] + b * y[j]


@_fast
def _product(x, y):
    total = 0.0
    for j in range(x.size):
        total += x[j] * y[j]
    return total


@_njit
def _page(given, number, later, room, shares, kb, vb, vectors, runs, size):
    """One page of one head, into ``room``, while the page with number ``later`` is asked for. room: fp32 [V (B + 2)];
    shares: scratch of V pages of fp32 numbers."""
    width, page, block = len(vectors), given[_PAGE], given[_SIZE]
    at = cpu._array(given[_WHERE] + 32 * number, (4,), np.int64)  # keys, their scales, values, their scales
    ahead = cpu._array(given[_WHERE] + 32 * later, (4,), np.int64)  # a processor's own guess stops at a page's end
    simd.prefetch_1kb(ahead[1], False)
    simd.prefetch_1kb(ahead[3], False)
    head, count = number // given[_PAGES], min(page, given[_LENGTH] - number % given[_PAGES] * page)
    whole, rows, key_bytes = (count + LANES - 1) // LANES * LANES, _together(width), block * len(kb) // 8
    x, to, out = given[_X] + 4 * width * block * head, cpu._address(shares), cpu._address(room)
    for t in range(0, whole, rows):  # of the last tokens of a page that has fewer, whatever lies there
        score(at[0] + t * key_bytes, at[1] + t * len(size), x, to + 4 * t, 4 * page, given[_LEVELS],
              ahead[0] + t * key_bytes, kb, vectors, runs, size)  # fmt: skip
    factor = np.float32(1.0 / math.sqrt(block))
    for v in range(width):
        shares[page * v + count : page * v + whole] = -np.inf
        soften(to + 4 * page * v, whole, factor, out + 4 * width * block + 8 * v)
        weigh(to + 4 * page * v, at[3], whole, size)
    combine(at[2], to, 4 * page, count, out, given[_VALUE_LEVELS], ahead[2], vb, vectors, runs)


@_njit
def _some(given, first, last, room, shares, kb, vb, vectors, runs, size):
    """Pages from number ``first`` on, each head's one after the other. What a head's pages here have found is joined
    at once and stands where the first of them would: other threads need not fetch the rest. room: two of ``_page``."""
    width, block, pages = len(vectors), given[_SIZE], given[_PAGES]
    stats = cpu._array(given[_STATS], (given[_HEADS] * pages, width, 2), np.float32)
    found, new = room[: width * (block + 2)], room[width * (block + 2) :]
    start, threads = first, (given[cpu._PIECES] + 15) // 16  # as many go on meanwhile with the pieces after this one
    for number in range(first, last):
        later = number + 1 if number + 1 < last else min(last + (threads - 1) * (last - first), len(stats) - 1)
        if number == start:
            _page(given, number, later, found, shares, kb, vb, vectors, runs, size)
        else:
            _page(given, number, later, new, shares, kb, vb, vectors, runs, size)
            stats[number, :, 0], stats[number, :, 1] = -np.inf, 0.0
            for v in range(width):
                at, of = width * block + 2 * v, slice(v * block, (v + 1) * block)
                largest = max(found[at], new[at])
                mine, its = np.exp(found[at] - largest), np.exp(new[at] - largest)
                _blend(found[of], mine, new[of], its)
                found[at], found[at + 1] = largest, found[at + 1] * mine + new[at + 1] * its
        if number + 1 == last or (number + 1) % pages == 0:
            simd.copy_bytes(given[_SUMS] + 4 * width * block * start, cpu._address(found), 4 * width * block)
            for v in range(width):
                stats[start, v, 0], stats[start, v, 1] = found[width * block + 2 * v], found[width * block + 2 * v + 1]
            start = number + 1


@cache
def _kernel(key_bits: int, value_bits: int, vectors_: int, runs_: int, size_: int) -> Callable[[int], None]:
    """The kernel of bits of keys and values, queries a head, runs of 64 in a block, bytes of a scale."""
    kb, vb, vectors, runs, stamp = (0,) * key_bits, (0,) * value_bits, (0,) * vectors_, (0,) * runs_, _STAMP
    size = (0,) * size_

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        shares = cpu._scratch(len(vectors) * given[_PAGE])
        room = cpu._scratch(2 * len(vectors) * (given[_SIZE] + 2))
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            _some(given, first, last, room, shares, kb, vb, vectors, runs, size)
        cpu._hold((shares, room))

    return _native(body)


def _native(body: Callable) -> Callable[[int], None]:
    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def in_lanes(matrix_D: Tensor, dim: int) -> Tensor:
    """A dimension of ``matrix_D`` brought into the order of lanes."""
    size = matrix_D.shape[dim]
    return matrix_D.index_select(dim, torch.arange(size).view(-1, LANES, _RUNS).transpose(1, 2).reshape(-1))


@_njit
def _turn(given):
    """Queries times the matrices of their heads."""
    heads, width, block = given[_HEADS], given[_QUERIES], given[_SIZE]
    some = cpu._array(given[_FIRST], 7, np.int64)
    q = cpu._array(given[_Q], (heads * width, block), np.float32)
    x = cpu._array(given[_X], (heads * width, block), np.float32)
    for r in range(heads * width):
        matrix = cpu._array(given[_TURN] + some[_TURN_PITCH] * (r // width), (block, block), np.float32)
        x[r] = 0.0
        for i in range(block):
            _add(x[r], matrix[i], q[r, i])


@_fast
def _product_apart(x, y, mean):
    total = 0.0
    for j in range(x.size):
        total += x[j] * (y[j] - mean[j])
    return total


@_njit
def _exactly(given, some, row, scores):
    """Scores of the tokens kept exact; returns the largest."""
    block, head, largest = given[_SIZE], row // given[_QUERIES], -np.inf
    q = cpu._array(given[_Q] + 4 * block * row, block, np.float32)
    keys = cpu._array(some[_EXACT_KEYS], (given[_HEADS], some[_EXACT], block), np.float32)
    mean = cpu._array(some[_KEY_MEAN] + 4 * block * head, block, np.float32)  # taken off, as off all the others
    for s in range(some[_EXACT]):
        product = _product_apart(q, keys[head, s], mean) if some[_KEY_MEAN] else _product(q, keys[head, s])
        scores[s] = product / math.sqrt(block)
        largest = max(largest, scores[s])
    return largest


@_njit
def _join(given):
    """What the pages of each head have found, put together and turned back, and the tokens kept exact."""
    heads, width, block, pages = given[_HEADS], given[_QUERIES], given[_SIZE], given[_PAGES]
    rows, some = heads * width, cpu._array(given[_FIRST], 7, np.int64)
    sums = cpu._array(given[_SUMS], (heads, pages, width, block), np.float32)
    stats = cpu._array(given[_STATS], (heads, pages, width, 2), np.float32)
    out = cpu._array(given[_OUT], (rows, block), np.float32)
    exact = cpu._array(some[_EXACT_VALUES], (heads, some[_EXACT], block), np.float32)
    joined, scores = np.empty(block, np.float32), np.empty(some[_EXACT])
    for row in range(rows):
        head, v, total = row // width, row % width, 0.0
        largest = _exactly(given, some, row, scores)
        for p in range(pages):
            largest = max(largest, stats[head, p, v, 0])
        joined[:] = 0.0
        for p in range(pages):
            if stats[head, p, v, 1] != 0.0:  # else it is joined already: a page's own sum is 1 at least, or NaN
                weight = math.exp(stats[head, p, v, 0] - largest)
                total += weight * stats[head, p, v, 1]
                _add(joined, sums[head, p, v], np.float32(weight))
        out[row] = 0.0
        matrix = cpu._array(given[_BACK] + some[_BACK_PITCH] * head, (block, block), np.float32)
        for j in range(block):
            _add(out[row], matrix[j], joined[j])
        if some[_VALUE_MEAN]:  # once for all that codes hold
            _add(out[row], cpu._array(some[_VALUE_MEAN] + 4 * block * head, block, np.float32), np.float32(total))
        for s in range(some[_EXACT]):
            weight = math.exp(scores[s] - largest)
            total += weight
            _add(out[row], exact[head, s], np.float32(weight))
        for i in range(block):
            out[row, i] /= np.float32(total)


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


class Reader:
    """Attention to codes that lie in pages, again and again while no page and no exact token comes or goes.

    In which order pages are joined, and so the last bits, depends on the number of threads.

    Args:
        pages: of each of the P, of keys the payload [K, page, bytes] and the scales [K, page, 1], of values likewise;
            ``page`` a multiple of 16.
        exact_KSD: keys and values of the tokens before them.
        bits, levels: of keys and of values.
        turn_KDD: what queries are multiplied with, its columns in the order of lanes; of all heads, or [1, D, D].
        back_KDD: what sums of values are, its rows in the order of lanes; likewise.
        means: taken off the keys and the values that codes stand for, [K, D] or [1, D]; None for none.
    """

    def __init__(
        self, pages: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], exact_KSD: tuple[Tensor, Tensor],
        bits: tuple[int, int], levels: Sequence[Tensor], turns: tuple[Tensor, Tensor],
        means: tuple[Tensor | None, Tensor | None],
    ) -> None:  # fmt: skip
        (heads, exact, block), self.bits = exact_KSD[0].shape, bits
        assert block % RUN == 0 and all(b in matvec.BITS for b in bits) and exact_KSD[1].shape == exact_KSD[0].shape
        first, matrices = [x.float().contiguous() for x in exact_KSD], [x.float().contiguous() for x in turns]
        shifts = [None if x is None else x.float().expand(heads, block).contiguous() for x in means]
        tables = [matvec._levels(b, level.numpy().tobytes())[0] for b, level in zip(bits, levels, strict=True)]
        self.page, self.scale_size, where = LANES, 4, np.zeros((0, 4), np.int64)
        if pages:
            self.page, self.scale_size = pages[0][0].shape[1], pages[0][1].element_size()
            assert self.page % LANES == 0
            starts = np.array([[part.data_ptr() for part in each] for each in pages], np.int64)
            steps = np.array([part.stride(0) * part.element_size() for part in pages[0]], np.int64)  # the same in all
            where = (starts + steps * np.arange(heads)[:, None, None]).reshape(-1, len(steps))
        known = [x for x in shifts if x is not None]
        cpu._held_to_memory(*first, *matrices, *known, *(part for each in pages for part in each))
        pitches = [0 if len(x) == 1 else 4 * block * block for x in matrices]
        at = [x.data_ptr() for x in first] + [0 if x is None else x.data_ptr() for x in shifts]
        of_first = np.array([*pitches, exact, *at], np.int64)
        self.shape, self.exact = (heads, block), exact
        self._held = pages, first, matrices, known, tables, where, of_first
        self._given = cpu._arguments({
            _WHERE: where.ctypes.data, _LEVELS: tables[0].ctypes.data, _VALUE_LEVELS: tables[1].ctypes.data,
            _HEADS: heads, _PAGE: self.page, _SIZE: block, _TURN: matrices[0].data_ptr(),
            _BACK: matrices[1].data_ptr(), _PAGES: len(pages), cpu._BLOCKS: cpu._GROUP * len(where),
            _FIRST: of_first.ctypes.data,
        })  # fmt: skip

    def __call__(self, q_KVD: Tensor, length: int) -> Tensor:
        """Attention of fp32 queries q_KVD to the exact tokens and to ``length`` tokens in pages: fp32 [K, V, D]."""
        (heads, vectors, block), pages, q_KVD = q_KVD.shape, len(self._held[0]), q_KVD.contiguous()
        cpu._held_to_memory(q_KVD)
        assert vectors <= MOST and q_KVD.dtype == torch.float32 and (heads, block) == self.shape, q_KVD.shape
        assert max(pages - 1, 0) * self.page <= length <= pages * self.page, (length, pages)
        rows, given = heads * vectors, self._given.copy()
        at = _room(rows * (block + pages * (block + 2)))
        out = torch.empty(q_KVD.shape, dtype=torch.float32, device="cpu")
        given[_X], given[_SUMS], given[_STATS] = at, at + 4 * rows * block, at + 4 * rows * block * (1 + pages)
        given[_LENGTH], given[_QUERIES], given[_Q], given[_OUT] = length, vectors, q_KVD.data_ptr(), out.data_ptr()
        address = _pointer(given)
        _around(True)(address)
        if pages:
            kernel = _kernel(*self.bits, vectors, block // RUN, self.scale_size)
            cpu._run(kernel, given, rows * length * block)
        _around(False)(address)
        return out


_own = threading.local()  # of each thread that attends: numbers that last for a call


def _room(floats: int) -> int:
    """Address of at least so many fp32 numbers."""
    known = getattr(_own, "room", None)
    if known is None or known.size < floats:
        known = _own.room = np.empty(2 * floats, np.float32)
    return _pointer(known)


def _pointer(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])

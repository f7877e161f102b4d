"""Packed codes times vectors on the CPU: a matrix is read once, as the 2, 3 or 4 bits that it is stored in.

Codes stay in the rotated domain: the vector is rotated instead, once. Of 64 numbers of a row, lane i of a register gets
those at 4 i ... 4 i + 3 by shifts alone, so vectors are kept in that order. Levels are looked up by a permute, and
multiplied and added in fp32; or levels and vectors are taken as 8-bit integers, whose products are exact, 64 at a time.

A few rows go together, so that what is read of the vectors is used for each; several vectors go together, so that a
level is looked up once for all. Lengths that are no multiple of a block are padded by whoever calls.

Shapes: O rows, N blocks of a row, B block size (64, 128, ...), V vectors (1 to 8).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from torch import Tensor

from . import cpu, simd
from .simd import _INT, _INTS, LANES, _Code, _codelet, _Table, _Vector

BITS = (2, 3, 4)
RUN = 64  # numbers that are worked on together
AHEAD = 4096  # bytes that are asked for before their turn, where the rows that go together have fewer
MOST = 8  # vectors that go together
_LONG, _BYTE = ir.IntType(64), ir.IntType(8)
_BYTES64, _BYTES32, _BYTES16 = (ir.VectorType(_BYTE, n) for n in (64, 32, 16))
# places in the array of int64 that a kernel is called with; the first three and the block count are those of ``cpu``
_PAYLOAD, _PITCH, _SCALES, _SCALE_SIZE, _COUNT, _BLOCK, _X, _X_PITCH, _X_SCALES, _SUMS, _OUT, _ROWS, _LEVELS = (
    3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16,
)  # fmt: skip
_STAMP = cpu._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")


def _nibbles(code: _Code, address: ir.Value, offset: ir.Value) -> ir.Value:
    """Eight bytes as 16 of four bits each, the lowest first."""
    b = code.b
    raw = b.load(code.at(address, offset, ir.VectorType(_BYTE, 8)), align=1)
    wide = ir.VectorType(ir.IntType(16), 8)
    pairs = b.zext(raw, wide)
    spread = b.or_(pairs, b.shl(pairs, ir.Constant(wide, [4] * 8)))
    return b.bitcast(b.and_(spread, ir.Constant(wide, [0x0F0F] * 8)), _BYTES16)


class _Indices:
    """Of 64 codes, the four registers of 16 indices; bits above those of an index may be anything up to the fourth."""

    def __init__(self, code: _Code, bits: int, payload: ir.Value, low: ir.Value, high: ir.Value) -> None:
        self.bits, b = bits, code.b
        if bits == 4:
            shorts = b.load(code.at(payload, low, ir.VectorType(ir.IntType(16), LANES)), align=1)
            self.low = _Vector(code, b.zext(shorts, _INTS))
        else:
            raw = b.load(code.at(payload, low, _BYTES16), align=1)
            self.low = _Vector(code, b.zext(raw, _INTS))
            self.high = _Vector(code, b.zext(_nibbles(code, payload, high), _INTS)) << 2 if bits == 3 else None

    def __getitem__(self, k: int) -> _Vector:
        if self.bits == 4:
            return self.low >> (4 * k)
        found = self.low >> (2 * k)
        return (found & 3) | ((self.high >> k) & ~3 & 0xFFFFFFFF) if self.bits == 3 else found


def _fetch(code: _Code, address: ir.Value, offset: ir.Value) -> None:
    """Asks for what is read soon: rows and pages are short, and a processor that guesses stops at their ends."""
    b = code.b
    flags = [ir.Constant(_INT, flag) for flag in (0, 3, 1)]  # to be read, in the first cache, data
    type_ = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *(flag.type for flag in flags)])
    function = cgutils.get_or_insert_function(b.module, type_, "llvm.prefetch.p0")
    b.call(function, [code.at(address, offset, _BYTE), *flags])


def _scale(code: _Code, scales: ir.Value, offset: ir.Value, size: int) -> ir.Value:
    b = code.b
    if size == 4:
        return b.load(code.at(scales, offset, ir.FloatType()), align=1)
    short = b.load(code.at(scales, offset, ir.IntType(16)), align=1)
    return b.bitcast(b.shl(b.zext(short, _INT), ir.Constant(_INT, 16)), ir.FloatType())


def _sum(code: _Code, v: _Vector) -> ir.Value:
    """Of 16 lanes."""
    b, value, width = code.b, v.value, LANES
    while width > 1:
        width //= 2
        lanes = [ir.Constant(ir.VectorType(_INT, width), list(range(s, s + width))) for s in (0, width)]
        parts = [b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), each) for each in lanes]
        value = b.fadd(*parts)
    return b.extract_element(value, ir.Constant(_INT, 0))


@_codelet("bits", "rows", "vectors", "runs", "size")
def dot(code, payload, pitch, scales, x, x_pitch, blocks, out, out_pitch, levels, bits, rows, vectors, runs, size):
    """Rows times vectors in fp32. payload, scales: of the first row; pitch: bytes of a row; x: [V, N, B] in the order
    of lanes; out: the first row's place, ``out_pitch`` bytes from one vector to the next; runs: of 64 in a block;
    size: bytes of a scale, 2 (bf16) or 4."""
    b, long = code.b, lambda n: ir.Constant(_LONG, n)
    table = _Table(code, levels, LANES, 1 << bits)
    sums = [[cgutils.alloca_once_value(b, code.constant(0.0)) for _ in range(vectors)] for _ in range(rows)]
    block_bytes = runs * RUN * bits // 8
    with cgutils.for_range(b, blocks, intp=_LONG) as loop:
        n = loop.index
        x_at, at = b.mul(n, long(4 * RUN * runs)), b.mul(n, long(block_bytes))
        for row in range(rows):
            here = b.add(at, b.mul(pitch, long(row)))
            found: list[Any] = [None] * vectors
            for run in range(runs):
                wide = 4 if bits == 4 else 2
                low = b.add(here, long(run * RUN * wide // 8))
                high = b.add(here, long(runs * RUN * 2 // 8 + run * RUN // 8))
                index = _Indices(code, bits, payload, low, high)
                for k in range(4):
                    level = table[index[k]]
                    for v in range(vectors):
                        place = b.add(b.add(x_at, long(4 * (RUN * run + LANES * k))), b.mul(x_pitch, long(v)))
                        value = code.load(x, place)
                        found[v] = level * value if found[v] is None else code.fma(level, value, found[v])
            where = b.mul(b.add(n, b.mul(blocks, long(row))), long(size))
            scale = code.splat(_scale(code, scales, where, size))
            for v in range(vectors):
                total = _Vector(code, b.load(sums[row][v]))
                b.store(code.fma(found[v], scale, total).value, sums[row][v])
    for row in range(rows):
        for v in range(vectors):
            place = b.add(b.mul(out_pitch, long(v)), long(4 * row))
            b.store(_sum(code, _Vector(code, b.load(sums[row][v]))), code.at(out, place, ir.FloatType()))


def _bytes(code: _Code, bits: int, payload: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Of 64 codes, the indices as bytes: at 4 bits those of even places, then of odd ones; else as ``_Indices``."""
    b = code.b

    def joined(part: ir.Value, times: int) -> ir.Value:
        lanes = [i % (64 // times) for i in range(64)]
        return b.shuffle_vector(part, ir.Constant(part.type, ir.Undefined), ir.Constant(ir.VectorType(_INT, 64), lanes))

    def shifted(value: ir.Value, counts: list[int]) -> ir.Value:
        words = b.bitcast(value, _INTS)
        each = [counts[i // (LANES // len(counts))] for i in range(LANES)]
        return b.bitcast(b.lshr(words, ir.Constant(_INTS, each)), _BYTES64)

    def masked(value: ir.Value, mask: int) -> ir.Value:
        return b.and_(value, ir.Constant(_BYTES64, [mask] * 64))

    if bits == 4:
        both = joined(b.load(code.at(payload, low, _BYTES32), align=1), 2)
        return masked(shifted(both, [0, 4]), 15)
    two = masked(shifted(joined(b.load(code.at(payload, low, _BYTES16), align=1), 4), [0, 2, 4, 6]), 3)
    if bits == 2:
        return two
    two_up = b.shl(_nibbles(code, payload, high), ir.Constant(_BYTES16, [2] * 16))
    ones = joined(two_up, 4)
    return b.or_(two, masked(shifted(ones, [0, 1, 2, 3]), 4))


TOGETHER = 4  # blocks of a row whose scales are read at once


def _of_blocks(code: _Code, scales: ir.Value, offset: ir.Value, size: int, count: int) -> ir.Value:
    """``count`` scales in a row, fp32."""
    b = code.b
    raw = b.load(code.at(scales, offset, ir.VectorType(ir.IntType(16) if size == 2 else _INT, count)), align=1)
    ints = ir.VectorType(_INT, count)
    whole = b.shl(b.zext(raw, ints), ir.Constant(ints, [16] * count)) if size == 2 else raw
    return b.bitcast(whole, ir.VectorType(ir.FloatType(), count))


def _everywhere(code: _Code, values: ir.Value, k: int) -> _Vector:
    """Number k of ``values`` in all lanes."""
    lanes = ir.Constant(_INTS, [k] * LANES)
    return _Vector(code, code.b.shuffle_vector(values, ir.Constant(values.type, ir.Undefined), lanes))


def _over_blocks(code: _Code, blocks: ir.Value, some: Callable[[ir.Value, int], None]) -> None:
    """``some(n, count)`` for all blocks, from number n on ``count`` at a time: first several, then those left one by
    one."""
    b, long = code.b, lambda n: ir.Constant(_LONG, n)
    groups = b.udiv(blocks, long(TOGETHER))
    with cgutils.for_range(b, groups, intp=_LONG) as loop:
        some(b.mul(loop.index, long(TOGETHER)), TOGETHER)
    begun = b.mul(groups, long(TOGETHER))
    with cgutils.for_range(b, b.sub(blocks, begun), intp=_LONG) as loop:
        some(b.add(begun, loop.index), 1)


@_codelet("bits", "rows", "vectors", "runs", "size")
def dot_integers(
    code, payload, pitch, scales, x, x_pitch, blocks, out, out_pitch, levels, x_scales, sums_at, bits, rows, vectors,
    runs, size,
):
    """As ``dot``, in integers: x: int8 [V, N, B] in the order of ``_bytes``; x_scales: fp32 [V, N]; sums_at: int32
    [V, N, 16], what offsets add to a block's sums; levels: 64 bytes, offset by 128. Needs AVX-512 VNNI and BW."""
    b, long = code.b, lambda n: ir.Constant(_LONG, n)
    table = b.load(code.at(levels, 0, _BYTES64), align=1)
    shuffle = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_BYTES64, [_BYTES64, _BYTES64]), "llvm.x86.avx512.pshuf.b.512"
    )
    product = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_INTS, [_INTS, _INTS, _INTS]), "llvm.x86.avx512.vpdpbusd.512"
    )
    after = b.mul(pitch, long(rows))
    ahead = b.select(b.icmp_signed("<", after, long(AHEAD)), long(AHEAD), after)
    sums = [[cgutils.alloca_once_value(b, code.constant(0.0)) for _ in range(vectors)] for _ in range(rows)]
    block_bytes = runs * RUN * bits // 8

    def some(n: ir.Value, count: int) -> None:
        x_at, at = b.mul(n, long(RUN * runs)), b.mul(n, long(block_bytes))
        begin, factor = [], []
        for v in range(vectors):
            row_of = b.add(n, b.mul(blocks, long(v)))
            places = [b.add(b.mul(row_of, long(64)), long(64 * block)) for block in range(count)]
            begin.append([b.load(code.at(sums_at, place, _INTS), align=1) for place in places])
            factor.append(_of_blocks(code, x_scales, b.mul(row_of, long(4)), 4, count))
        for row in range(rows):
            where = b.mul(b.add(n, b.mul(blocks, long(row))), long(size))
            scale, first = _of_blocks(code, scales, where, size, count), b.add(at, b.mul(pitch, long(row)))
            both = [b.fmul(scale, factor[v]) for v in range(vectors)]
            for line in range(0, count * block_bytes, 64):
                _fetch(code, payload, b.add(b.add(first, long(line)), ahead))
            for block in range(count):
                here, found = b.add(first, long(block * block_bytes)), [begin[v][block] for v in range(vectors)]
                for run in range(runs):
                    low = b.add(here, long(run * RUN * (4 if bits == 4 else 2) // 8))
                    high = b.add(here, long(runs * RUN * 2 // 8 + run * RUN // 8))
                    level = b.bitcast(b.call(shuffle, [table, _bytes(code, bits, payload, low, high)]), _INTS)
                    for v in range(vectors):
                        of_x = RUN * (runs * block + run)
                        place = b.add(b.add(x_at, long(of_x)), b.mul(x_pitch, long(v)))
                        found[v] = b.call(product, [found[v], level, b.load(code.at(x, place, _INTS), align=1)])
                for v in range(vectors):
                    whole = _Vector(code, b.sitofp(found[v], simd._FLOATS))
                    total = _Vector(code, b.load(sums[row][v]))
                    b.store(code.fma(whole, _everywhere(code, both[v], block), total).value, sums[row][v])

    _over_blocks(code, blocks, some)
    for row in range(rows):
        for v in range(vectors):
            place = b.add(b.mul(out_pitch, long(v)), long(4 * row))
            b.store(_sum(code, _Vector(code, b.load(sums[row][v]))), code.at(out, place, ir.FloatType()))


def rows_together(vectors: int) -> int:
    """Rows that share what is read of the vectors: as many as registers hold."""
    return 4 if vectors <= 2 else 2 if vectors <= 4 else 1


def integers_run() -> bool:
    """Whether this processor multiplies bytes in registers of 64."""
    flags = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else ""
    return "AVX512" in flags and _has("avx512_vnni") and _has("avx512bw")


@cache
def _has(flag: str) -> bool:
    try:
        return f" {flag} " in Path("/proc/cpuinfo").read_text().replace("\n", " ")
    except OSError:
        return False


@_njit
def _at(given, row):
    """Addresses of a row's payload, of its scales, and of its place in the output."""
    scales = given[_SCALES] + row * given[_COUNT] * given[_SCALE_SIZE]
    return given[_PAYLOAD] + row * given[_PITCH], scales, given[_OUT] + 4 * row


@_njit
def _exact(given, row, bits, rows, vectors, runs, size):
    payload, scales, out = _at(given, row)
    dot(payload, given[_PITCH], scales, given[_X], given[_X_PITCH], given[_COUNT], out, 4 * given[_ROWS],
        given[_LEVELS], bits, rows, vectors, runs, size)  # fmt: skip


@_njit
def _rounded(given, row, bits, rows, vectors, runs, size):
    payload, scales, out = _at(given, row)
    dot_integers(payload, given[_PITCH], scales, given[_X], given[_X_PITCH], given[_COUNT], out, 4 * given[_ROWS],
                 given[_LEVELS], given[_X_SCALES], given[_SUMS], bits, rows, vectors, runs, size)  # fmt: skip


@cache
def _kernel(bits_: int, vectors_: int, runs_: int, size_: int, integers: bool) -> Callable[[int], None]:
    """The kernel of some bits, vectors, runs of 64 in a block and bytes of a scale; see ``cpu._kernel``."""
    bits, vectors, runs, stamp = (0,) * bits_, (0,) * vectors_, (0,) * runs_, _STAMP
    size, rows_, together = (0,) * size_, rows_together(vectors_), (0,) * rows_together(vectors_)
    one = (0,)

    product = _rounded if integers else _exact

    def body(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            row, end = first * rows_, min(last * rows_, given[_ROWS])
            while row < end:
                if row + rows_ <= end:
                    product(given, row, bits, together, vectors, runs, size)
                    row += rows_
                else:
                    product(given, row, bits, one, vectors, runs, size)
                    row += 1

    compiled = cpu._compiled(body)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


@lru_cache(maxsize=16)
def _levels(bits: int, levels: bytes) -> tuple[np.ndarray, np.ndarray, float]:
    """(the levels repeated to 16, as bytes offset by 128 and repeated to 64, what a byte's step is)."""
    found = np.frombuffer(levels, np.float32)
    step = float(np.abs(found).max()) / 127
    whole = (np.rint(found / step) + 128).astype(np.uint8)
    return np.resize(found, LANES), np.resize(np.resize(whole, 16), 64), step


class Vectors:
    """Vectors as the kernels read them: rotated, in the order of lanes; the same for all matrices that see them.

    Args:
        rotated_VI: fp32 [V, I], I a multiple of the block; contiguous.
        block: numbers with one scale.
        bits: of the matrices; those of 4 bits have another order in integers than the others.
        integers: whether as 8-bit integers with a scale for each block.
    """

    def __init__(self, rotated_VI: Tensor, block: int, bits: int, integers: bool) -> None:
        vectors, columns = rotated_VI.shape
        assert vectors <= MOST and columns % block == 0 and block % RUN == 0
        self.shape, self.block, self.integers = (vectors, columns), block, integers
        self.order = "bytes" if integers and bits == 4 else "lanes"
        self.lanes = 32 if self.order == "bytes" else LANES
        lanes = self.lanes, RUN // self.lanes
        if not integers:
            self.values = rotated_VI.view(-1, *lanes).transpose(1, 2).contiguous()
            self.scales = self.sums = None
            return
        blocks = rotated_VI.view(-1, block)
        scales = blocks.abs().amax(1) / 127
        whole = (blocks / scales.clamp(min=1e-30)[:, None]).round_()
        self.values = whole.view(-1, *lanes).transpose(1, 2).to(torch.int8).contiguous()
        self.scales = scales
        self.sums = torch.zeros(len(blocks), LANES, dtype=torch.int32)
        self.sums[:, 0] = -128 * whole.sum(1).int()


def multiply(payload_NW: Tensor, scale_N: Tensor, x: Vectors, bits: int, levels_L: Tensor, out_VO: Tensor) -> None:
    """out = matrix times vectors, for a matrix whose row r has the blocks from r I / B on.

    payload_NW: uint8, scale_N: fp32 or bf16, of all blocks; levels_L: fp32; out_VO: fp32 [V, O]. All contiguous and on
    the CPU.
    """
    held = x
    if x.integers:
        assert x.scales is not None
        held = copy.copy(x)
        held.scales = x.scales * integer_step(bits, levels_L)
    prepared(payload_NW, scale_N, held, bits, levels_L, out_VO)()


def integer_step(bits: int, levels_L: Tensor) -> float:
    """What one step of a level as an integer is; scales of vectors are times this before ``prepared`` products."""
    return _levels(bits, levels_L.numpy().tobytes())[2]


def prepared(
    payload_NW: Tensor, scale_N: Tensor, x: Vectors, bits: int, levels_L: Tensor, out_VO: Tensor
) -> Callable[[], None]:
    """A product as a call, again and again, on what the same memory then holds; arguments as of ``multiply``.

    In integers, ``x.scales`` hold the scales times ``integer_step``.
    """
    (vectors, rows), columns = out_VO.shape, x.shape[1]
    count = columns // x.block
    assert bits in BITS and payload_NW.shape[0] == rows * count and payload_NW.shape[1] == x.block * bits // 8
    assert vectors == x.shape[0] and scale_N.numel() == rows * count and out_VO.dtype == torch.float32
    cpu._held_to_memory(payload_NW, scale_N, out_VO)
    exact, whole, _ = tables = _levels(bits, levels_L.numpy().tobytes())
    values = {
        _PAYLOAD: payload_NW.data_ptr(), _PITCH: count * payload_NW.shape[1], _SCALES: scale_N.data_ptr(),
        _SCALE_SIZE: scale_N.element_size(), _COUNT: count, _BLOCK: x.block, _X: x.values.data_ptr(),
        _X_PITCH: columns * x.values.element_size(), _OUT: out_VO.data_ptr(), _ROWS: rows,
        _LEVELS: (whole if x.integers else exact).ctypes.data,
        cpu._BLOCKS: cpu._GROUP * -(-rows // rows_together(vectors)),
    }  # fmt: skip
    if x.integers:
        assert x.scales is not None and x.sums is not None
        values |= {_X_SCALES: x.scales.data_ptr(), _SUMS: x.sums.data_ptr()}
    kernel = _kernel(bits, vectors, x.block // RUN, scale_N.element_size(), x.integers)
    given, held = cpu._arguments(values), (payload_NW, scale_N, x, out_VO, tables)

    def call() -> None:
        given[cpu._NEXT] = 0
        cpu._run(kernel, given, rows * columns)

    call.given, call.held = given, held  # type: ignore[attr-defined]  # the arguments, and what their addresses are of
    return call

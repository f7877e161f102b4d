"""Numba kernels of the logarithmic codec of second moments: one pass over the numbers, bit for bit the PyTorch one.

Arithmetic, threads and the cache on disk are as in ``cpu``: every thread takes pieces of blocks from a counter.

Shapes: N blocks, B block size, W = B * bits / 8 bytes a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from . import cpu, simd

_OCTAVE, _INFINITY, _NAN = 1 << 23, 0x7F800000, 0x7FC0
# places in the array of int64 that a kernel is called with; the first three and the block count are those of ``cpu``
_V, _CODES, _RANGES, _WORDS, _NUMEL, _BLOCK, _BITS, _REACH = 3, 4, 5, 6, 7, 9, 10, 11
_STAMP = cpu._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")  # no contraction: the codes must be the reference's


@intrinsic
def _as_float(typingctx, bits):
    """The fp32 number with these bits."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@_njit
def _level(low, width, index):
    """Level number ``index`` (fp32) of a block, as the reference rounds it."""
    return _as_float(np.int32(low + np.int32(index * width)))


@_njit
def _encode_groups(first, last, given):
    block, bits, numel, reach = given[_BLOCK], given[_BITS], given[_NUMEL], given[_REACH]
    place = cpu._array(given[_V], numel, np.int32)
    v = cpu._array(given[_V], numel, np.float32)
    words = cpu._array(given[_WORDS], given[cpu._BLOCKS] * block, np.int16)
    codes = cpu._array(given[_CODES], (given[cpu._BLOCKS], block * bits // 8), np.uint8)
    ranges = cpu._array(given[_RANGES], (given[cpu._BLOCKS], 2), np.int16)
    top, parts = np.float32((1 << bits) - 2), 8 // bits
    found = np.empty(block, np.int32)
    for n in range(first * 16, min(last * 16, given[cpu._BLOCKS])):
        start, count = n * block, min(block, numel - n * block)
        low, high = np.int32(_INFINITY), np.int32(0)
        for i in range(start, start + count):
            bits_of = place[i]
            high = max(high, bits_of)
            low = min(low, bits_of if bits_of != 0 else np.int32(_INFINITY))
        if high >= _INFINITY or low < 0:
            ranges[n, 0] = ranges[n, 1] = _NAN
        else:
            low = min(max(np.int64(low), np.int64(high) - reach), np.int64(high))
            ranges[n, 0], ranges[n, 1] = low >> 16, (np.int64(high) + 0xFFFF) >> 16
        low = np.int32(ranges[n, 0]) << 16
        width = max(np.float32((np.int32(ranges[n, 1]) << 16) - low) / top, np.float32(1.0))
        found[count:] = 0
        for k in range(count):  # no branches: the compiler makes vectors of it
            i = start + k
            below = np.float32(np.floor(np.float32(np.int32(place[i] - low)) / width))
            below = min(max(below, np.float32(0.0)), top)
            lower = _level(low, width, below)
            gap = _level(low, width, below + np.float32(1.0)) - lower
            dither = (np.float32(words[i]) + np.float32(32768.5)) * np.float32(1 / 65536)
            up = np.float32(1.0) if dither * gap < v[i] - lower else np.float32(0.0)
            code = np.int32(below + np.float32(1.0) + up)
            found[k] = code if place[i] != 0 else np.int32(0)
        for j in range(block // parts):
            packed = found[j * parts]
            for part in range(1, parts):
                packed |= found[j * parts + part] << (part * bits)
            codes[n, j] = packed


@_njit
def _decode_groups(first, last, given):
    block, bits, numel = given[_BLOCK], given[_BITS], given[_NUMEL]
    out = cpu._array(given[_V], numel, np.float32)
    codes = cpu._array(given[_CODES], (given[cpu._BLOCKS], block * bits // 8), np.uint8)
    ranges = cpu._array(given[_RANGES], (given[cpu._BLOCKS], 2), np.int16)
    top, parts, mask = np.float32((1 << bits) - 2), 8 // bits, (1 << bits) - 1
    found = np.empty(block, np.int32)
    for n in range(first * 16, min(last * 16, given[cpu._BLOCKS])):
        low = np.int32(ranges[n, 0]) << 16
        width = max(np.float32((np.int32(ranges[n, 1]) << 16) - low) / top, np.float32(1.0))
        for j in range(block // parts):
            for part in range(parts):
                found[j * parts + part] = (codes[n, j] >> (part * bits)) & mask
        if ranges[n, 1] == _NAN:
            out[n * block : min((n + 1) * block, numel)] = np.nan
            continue
        start = n * block
        for k in range(min(block, numel - start)):
            index = found[k]
            level = _level(low, width, np.float32(max(index - 1, 0)))
            out[start + k] = level if index > 0 else np.float32(0.0)


@cache
def _kernel(encodes: bool) -> Callable[[int], None]:
    stamp = _STAMP

    def encoder(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                return
            _encode_groups(first, last, given)

    def decoder(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                return
            _decode_groups(first, last, given)

    compiled = cpu._compiled(encoder if encodes else decoder)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def _given(v: Tensor, codes: Tensor, ranges: Tensor, block: int, bits: int, words: int, reach: int) -> Any:
    given = np.zeros(cpu._FIELDS, np.int64)
    given[[_V, _CODES, _RANGES, _WORDS, _NUMEL]] = v.data_ptr(), codes.data_ptr(), ranges.data_ptr(), words, v.numel()
    given[[cpu._BLOCKS, _BLOCK, _BITS, _REACH]] = codes.shape[0], block, bits, reach
    return given


def encode(v: Tensor, codes_NW: Tensor, ranges_N2: Tensor, words: Tensor, block: int, bits: int, octaves: int) -> None:
    """Encode contiguous fp32 ``v``; ``words``: int16 [N * B], the dither. All on the CPU."""
    given = _given(v, codes_NW, ranges_N2, block, bits, words.data_ptr(), octaves * _OCTAVE)
    cpu._run(_kernel(True), given, v.numel())


def decode(codes_NW: Tensor, ranges_N2: Tensor, out: Tensor, block: int, bits: int) -> None:
    """Decode into contiguous fp32 ``out``. All on the CPU."""
    cpu._run(_kernel(False), _given(out, codes_NW, ranges_N2, block, bits, 0, 0), out.numel())


assert simd.LANES == cpu._GROUP == 16  # the pieces of ``cpu`` are groups of as many blocks

"""Numba kernels of the logarithmic codec of second moments: one pass over the numbers, bit for bit the PyTorch one.

Arithmetic, threads and the cache on disk are as in ``cpu``: every thread takes pieces of blocks from a counter.

Shapes: N blocks, B block size, W = B * bits / 8 bytes a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from torch import Tensor

from . import cpu, simd

_OCTAVE, _INFINITY, _NAN = 1 << 23, 0x7F800000, 0x7FC0
# places in the array of int64 that a kernel is called with; the first three and the block count are those of ``cpu``
_V, _CODES, _RANGES, _SEED, _NUMEL, _BLOCK, _BITS, _REACH = 3, 4, 5, 6, 7, 9, 10, 11
_DITHER = 3  # what Philox's numbers are for
_STAMP = cpu._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")  # no contraction: the codes must be the reference's


_BITS_2, _BITS_4, _BITS_8 = (0,) * 2, (0,) * 4, (0,) * 8  # the length of a tuple selects a codelet's variant
_FP32 = simd.KIND_TAGS[simd.FP32]


@_njit
def _room(block):
    """fp32 numbers of the scratch memory that a group is worked off in."""
    return 3 * block + 512


@_njit
def _encode_row(v, chances, low, width, target, vectors, bits):
    for i in range(0, vectors - 7, 8):
        simd.log_encode(v + 64 * i, chances + 64 * i, low, width, target + 2 * len(bits) * i, bits, 8)
    for i in range(vectors // 8 * 8, vectors):
        simd.log_encode(v + 64 * i, chances + 64 * i, low, width, target + 2 * len(bits) * i, bits, 1)


@_njit
def _decode_row(codes, low, width, target, vectors, bits):
    for i in range(0, vectors - 7, 8):
        simd.log_decode(codes + 2 * len(bits) * i, low, width, target + 64 * i, bits, 8)
    for i in range(vectors // 8 * 8, vectors):
        simd.log_decode(codes + 2 * len(bits) * i, low, width, target + 64 * i, bits, 1)


@_njit
def _grid(ranges, n, top):
    """Bits of the lowest level of a block, and the distance between levels; wraps around as the reference's int32."""
    low = np.int64(ranges[n, 0]) << 16
    return low, max(np.float32(np.int32((np.int32(ranges[n, 1]) << 16) - low)) / top, np.float32(1.0))


@_njit
def _own(given, n, block, own):
    """Where the numbers of a block can be read in whole vectors: where they lie, or a copy with zeros after them."""
    start = n * block
    count, v = min(block, given[_NUMEL] - start), given[_V] + 4 * start
    if count == block and block % 16 == 0:
        return v, True
    simd.zero_bytes(own, 64 * ((block + 15) // 16))
    simd.copy_bytes(own, v, 4 * count)
    return own, False


@_njit
def _encode_group(given, room, group):
    """Encode 16 blocks. room: fp32 scratch of ``_room`` numbers."""
    block, bits, reach = given[_BLOCK], given[_BITS], given[_REACH]
    ranges = cpu._array(given[_RANGES], (given[cpu._BLOCKS], 2), np.int16)
    top, vectors, nbytes = np.float32((1 << bits) - 2), (block + 15) // 16, block * bits // 8
    bounds, own = room[:4].view(np.int64), cpu._address(room) + 128
    own_codes, chances = own + 4 * block + 64, own + 8 * block + 128
    first, last = group * 16, min(group * 16 + 16, given[cpu._BLOCKS])
    for n in range(first, last):  # all ranges before all codes: what waits for a range is then not waited for
        v, whole = _own(given, n, block, own)
        bounds[0], bounds[1] = _INFINITY, -(1 << 31)
        for i in range(0, vectors - 7, 8):
            simd.log_range(v + 64 * i, cpu._address(bounds), 8)
        for i in range(vectors // 8 * 8, vectors):
            simd.log_range(v + 64 * i, cpu._address(bounds), 1)
        low, high = bounds[0], bounds[1]
        if high >= _INFINITY or low < 0:
            ranges[n, 0] = ranges[n, 1] = _NAN
        else:
            low = min(max(low, high - reach), high)
            ranges[n, 0], ranges[n, 1] = low >> 16, (high + 0xFFFF) >> 16
    for n in range(first, last):
        start = n * block
        v, whole = _own(given, n, block, own)
        low, width = _grid(ranges, n, top)
        for run in range(start // 128, (start + block + 127) // 128):
            simd.dither(given[_SEED], run, _DITHER, chances + 512 * (run - start // 128), _FP32)
        codes, skipped = given[_CODES] + n * nbytes, chances + 4 * (start % 128)
        target = codes if whole else own_codes
        if bits == 8:
            _encode_row(v, skipped, low, width, target, vectors, _BITS_8)
        elif bits == 4:
            _encode_row(v, skipped, low, width, target, vectors, _BITS_4)
        else:
            _encode_row(v, skipped, low, width, target, vectors, _BITS_2)
        if not whole:
            simd.copy_bytes(codes, own_codes, nbytes)


@_njit
def _decode_group(given, room, group):
    """Decode 16 blocks. room: as of ``_encode_group``."""
    block, bits, numel = given[_BLOCK], given[_BITS], given[_NUMEL]
    ranges = cpu._array(given[_RANGES], (given[cpu._BLOCKS], 2), np.int16)
    top, vectors, nbytes = np.float32((1 << bits) - 2), (block + 15) // 16, block * bits // 8
    own = cpu._address(room) + 128
    own_codes = own + 4 * block + 64
    for n in range(group * 16, min(group * 16 + 16, given[cpu._BLOCKS])):
        start, count = n * block, min(block, numel - n * block)
        out, codes = given[_V] + 4 * start, given[_CODES] + n * nbytes
        if ranges[n, 1] == _NAN:
            cpu._array(out, count, np.float32)[:] = np.nan
            continue
        low, width = _grid(ranges, n, top)
        whole = count == block and block % 16 == 0
        if not whole:
            simd.copy_bytes(own_codes, codes, nbytes)
            codes = own_codes
        target = out if whole else own
        if bits == 8:
            _decode_row(codes, low, width, target, vectors, _BITS_8)
        elif bits == 4:
            _decode_row(codes, low, width, target, vectors, _BITS_4)
        else:
            _decode_row(codes, low, width, target, vectors, _BITS_2)
        if not whole:
            simd.copy_bytes(out, own, 4 * count)


@cache
def _kernel(encodes: bool) -> Callable[[int], None]:
    stamp = _STAMP

    def encoder(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        room = cpu._scratch(_room(given[_BLOCK]))
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            for group in range(first, last):
                _encode_group(given, room, group)
        cpu._hold((room,))

    def decoder(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        room = cpu._scratch(_room(given[_BLOCK]))
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            for group in range(first, last):
                _decode_group(given, room, group)
        cpu._hold((room,))

    compiled = cpu._compiled(encoder if encodes else decoder)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def _values(numel: int, codes_NW: Tensor, ranges_N2: Tensor, block: int, bits: int) -> dict[int, int]:
    """The arguments of both directions but for the numbers; asserts what the kernels rely on."""
    blocks = -(-numel // block)
    cpu._held_to_memory(codes_NW, ranges_N2)
    assert codes_NW.nbytes == blocks * (block * bits // 8) and ranges_N2.nbytes == 4 * blocks
    return {
        _CODES: codes_NW.data_ptr(), _RANGES: ranges_N2.data_ptr(), _NUMEL: numel, cpu._BLOCKS: blocks, _BLOCK: block,
        _BITS: bits,
    }  # fmt: skip


def _numbers(v: Tensor) -> dict[int, int]:
    """The argument that says where the numbers lie."""
    cpu._held_to_memory(v)
    assert v.dtype == torch.float32
    return {_V: v.data_ptr()}


def encode(v: Tensor, codes_NW: Tensor, ranges_N2: Tensor, seed: int, *, block: int, bits: int, octaves: int) -> None:
    """Encode contiguous fp32 ``v``; ``seed``: of the dither. All on the CPU."""
    values = _values(v.numel(), codes_NW, ranges_N2, block, bits) | _numbers(v)
    given = cpu._arguments(values | {_SEED: cpu._signed(seed), _REACH: octaves * _OCTAVE})
    cpu._run(_kernel(True), given, v.numel())


def decode(codes_NW: Tensor, ranges_N2: Tensor, out: Tensor, *, block: int, bits: int) -> None:
    """Decode into contiguous fp32 ``out``. All on the CPU."""
    values = _values(out.numel(), codes_NW, ranges_N2, block, bits) | _numbers(out)
    cpu._run(_kernel(False), cpu._arguments(values), out.numel())


assert simd.LANES == cpu._GROUP == 16  # the pieces of ``cpu`` are groups of as many blocks

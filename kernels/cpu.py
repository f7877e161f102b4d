"""Numba encoder and decoder of blocks on the CPU: 16 blocks at a time, one lane each, in first-level cache.

A group of 16 blocks is read once, rotated in registers (in row order where butterflies pair whole vectors, as
transposed tiles where they pair neighbours), quantized with one lane a block, so that norms, scales and packed words
need no sums across lanes, and written once. The vector code is in ``simd``; here stand the order of the passes and the
arithmetic of a block. Same results as the PyTorch reference up to rounding: codes differ only where a coordinate falls
on a threshold within fp32 rounding. What becomes of a block depends on nothing but the block, so neither threads nor
neighbours matter. Hadamard rotations only; about 100 KB of temporaries a thread.

Shapes: N blocks, B block size, W packed bytes a block, R rounds, L = 2**bits levels, K multipliers.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import threading
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from . import simd

_GROUP = simd.LANES
_KINDS = {torch.float32: simd.FP32, torch.bfloat16: simd.BF16, torch.float16: simd.FP16}
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in _KINDS}
_SCALES = {"paper": 0, "mse": 1, "unbiased": 2, "norm": 3}
_SAFE = np.float32(2.0**60)  # a sum of squares between 1/_SAFE and _SAFE needs no power of two before it
_SMALL = 1 << 16  # elements below which waking other threads costs more than it saves
_LARGE = 1 << 22  # bytes of output that no second cache holds: written past the caches, which need not read it then
_PAD = simd.LANES  # floats between rows of a group, so that powers of two do not share one set of the cache

# Numba keys its disk cache by the code of a function and what it closes over; with the hash of both files among that,
# an edit anywhere in them is seen.
_STAMP = int(
    hashlib.blake2b(b"".join(Path(m).read_bytes() for m in (__file__, simd.__file__)), digest_size=6).hexdigest(), 16
)

# places in the one array of int64 that a kernel is called with; addresses, counts, the kind of the numbers, two float64
# (limit, factor), and what it answers: whether some scale is not finite
_PLACES = (
    _NEXT, _PIECES, _GROUPS, _X, _SIZE, _DIM, _PAYLOAD, _SCALE_AT, _BLOCKS, _SEED, _ROUNDS, _BLOCK, _TABLE, _ENTRIES,
    _MULTIPLIERS, _TRIALS, _CUTS, _SCALE, _KIND, _LIMIT, _FACTOR, _LOST,
) = tuple(range(22))  # fmt: skip
_FIELDS = len(_PLACES)  # that compiled code reads and ``_run`` holds every array of arguments to
_SIGNATURE = types.void(types.CPointer(types.int64))
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_njit = numba.njit(error_model="numpy", fastmath={"contract", "nsz"})
# the kind of elements is known when a kernel runs, not when it is compiled: only a row's loads and stores differ
_FP32, _BF16, _FP16, _ADD_FP32 = (simd.KIND_TAGS[kind] for kind in (simd.FP32, simd.BF16, simd.FP16, simd.ADD_FP32))
_STREAM_FP32, _STREAM_BF16, _STREAM_FP16 = (
    simd.KIND_TAGS[simd.STREAM + kind] for kind in (simd.FP32, simd.BF16, simd.FP16)
)
Search = tuple[tuple[float, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]  # of ``tq.quant.scale_search``


def _compiled(body: Callable) -> Any:
    """Numba's C function of one pointer, kept on disk: beside this file, else in the user's cache folder."""
    try:
        return numba.cfunc(_SIGNATURE, cache=True)(body)
    except RuntimeError as error:  # "cannot cache function ...: no locator available"
        warnings.warn(
            f"compiled CPU kernels cannot be kept ({error}), so every process compiles them anew for some seconds; "
            "set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        return numba.cfunc(_SIGNATURE)(body)


@_njit
def _across(z, block):
    """Butterflies across the vectors of one row, in place."""
    if block == 64:
        simd.butterflies(z, 1, 4)
    elif block == 128:
        simd.butterflies(z, 1, 8)
    elif block == 256:
        simd.butterflies(z, 1, 16)
    elif block == 512:
        for i in range(4):
            simd.butterflies(z + 64 * i, 4, 8)
        for i in range(8):
            simd.butterflies(z + 256 * i, 1, 4)
    else:
        for i in range(8):
            simd.butterflies(z + 64 * i, 8, 8)
        for i in range(8):
            simd.butterflies(z + 512 * i, 1, 8)


@_njit
def _load_row(source, kind, size, masks, z, energy, block):
    """Signs and the butterflies across the vectors of one block, and 16 partial sums of its squares."""
    if kind == simd.FP32:
        _load_row_of(source, _FP32, size, masks, z, energy, block)
    elif kind == simd.BF16:
        _load_row_of(source, _BF16, size, masks, z, energy, block)
    else:
        _load_row_of(source, _FP16, size, masks, z, energy, block)


@_njit
def _load_row_of(source, kind, size, masks, z, energy, block):
    simd.zero_bytes(energy, 64)
    if block == 64:
        simd.load_butterflies(source, kind, masks, z, energy, 1, 4)
    elif block == 128:
        simd.load_butterflies(source, kind, masks, z, energy, 1, 8)
    elif block == 256:
        simd.load_butterflies(source, kind, masks, z, energy, 1, 16)
    else:
        stride = block // 128
        for i in range(stride):
            simd.load_butterflies(source + 16 * size * i, kind, masks + 64 * i, z + 64 * i, energy, stride, 8)
        for i in range(8):
            if block == 512:
                simd.butterflies(z + 256 * i, 1, 4)
            else:
                simd.butterflies(z + 512 * i, 1, 8)


@_njit
def _store_row(z, masks, scale, limit, out, kind, size, block):
    """The last butterflies of one block, its signs and scale, to the output."""
    if kind == simd.FP32:
        _store_row_of(z, masks, scale, limit, out, _FP32, size, block)
    elif kind == simd.BF16:
        _store_row_of(z, masks, scale, limit, out, _BF16, size, block)
    elif kind == simd.FP16:
        _store_row_of(z, masks, scale, limit, out, _FP16, size, block)
    elif kind == simd.ADD_FP32:
        _store_row_of(z, masks, scale, limit, out, _ADD_FP32, size, block)
    elif kind == simd.STREAM + simd.FP32:
        _store_row_of(z, masks, scale, limit, out, _STREAM_FP32, size, block)
    elif kind == simd.STREAM + simd.BF16:
        _store_row_of(z, masks, scale, limit, out, _STREAM_BF16, size, block)
    else:
        _store_row_of(z, masks, scale, limit, out, _STREAM_FP16, size, block)


@_njit
def _store_row_of(z, masks, scale, limit, out, kind, size, block):
    if block == 64:
        simd.butterflies_store(z, masks, scale, limit, out, kind, 4)
    elif block == 128:
        simd.butterflies_store(z, masks, scale, limit, out, kind, 8)
    elif block == 256:
        simd.butterflies_store(z, masks, scale, limit, out, kind, 16)
    else:
        stride = block // 128
        for i in range(stride):
            simd.butterflies(z + 64 * i, stride, 8)
        for i in range(8):
            at = 16 * stride * i
            if block == 512:
                simd.butterflies_store(z + 4 * at, masks + 4 * at, scale, limit, out + size * at, kind, 4)
            else:
                simd.butterflies_store(z + 4 * at, masks + 4 * at, scale, limit, out + size * at, kind, 8)


@_njit
def _widen(source, kind, target):
    """16 elements to fp32."""
    if kind == simd.FP32:
        simd.widen(source, _FP32, target)
    elif kind == simd.BF16:
        simd.widen(source, _BF16, target)
    else:
        simd.widen(source, _FP16, target)


@_njit
def _largest(values):
    """Largest magnitude, or NaN where a value is not finite."""
    largest = np.float32(0.0)
    for v in values:
        if not abs(v) <= np.float32(3.4028235e38):
            return np.float32(np.nan)
        largest = max(largest, abs(v))
    return largest


@_njit
def _move_words(words, keep, payload, width, store):
    """All words of 16 blocks between vectors of one lane a block and the payload's rows of ``width`` bytes."""
    at = 0
    while width - at >= 64:
        if store:
            simd.store_words(words + 16 * at, keep, payload + at, width, 16)
        else:
            simd.load_words(payload + at, width, words + 16 * at, 16)
        at += 64
    if width - at >= 32:
        if store:
            simd.store_words(words + 16 * at, keep, payload + at, width, 8)
        else:
            simd.load_words(payload + at, width, words + 16 * at, 8)
        at += 32
    if width - at >= 16:
        if store:
            simd.store_words(words + 16 * at, keep, payload + at, width, 4)
        else:
            simd.load_words(payload + at, width, words + 16 * at, 4)
        at += 16
    if width - at >= 8:
        if store:
            simd.store_words(words + 16 * at, keep, payload + at, width, 2)
        else:
            simd.load_words(payload + at, width, words + 16 * at, 2)


@_njit
def _address(array):
    """Signed, as sums of Numba's unsigned addresses and integers would be floats."""
    return np.int64(array.ctypes.data)


@_njit
def _scratch(floats):
    """Uninitialised fp32 array that starts on a cache line."""
    buffer = np.empty(floats + 16, np.float32)
    start = (-buffer.ctypes.data % 64) // 4
    return buffer[start : start + floats]


_WORD, _SIGNS = np.uint64(0xFFFFFFFF), np.uint64(1)


@_njit
def _philox(a, b, c, d, seed):
    """Four words of random bits; all numbers uint64: see ``tq.quant.rotation.philox``."""
    half = np.uint64(32)
    low, high = seed & _WORD, seed >> half
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (q >> half) ^ b ^ low, q & _WORD, (p >> half) ^ d ^ high, p & _WORD
        low, high = (low + np.uint64(0x9E3779B9)) & _WORD, (high + np.uint64(0xBB67AE85)) & _WORD
    return a, b, c, d


@_njit
def _sign_masks(seed, rounds, block):
    """What the signs of all rounds flip: int32 [R * B] with the top bit set for -1."""
    masks = _scratch(rounds * block).view(np.int32)
    for i in range(0, rounds * block, 128):
        words = _philox(np.uint64(i // 128), np.uint64(block), np.uint64(0), _SIGNS, np.uint64(seed))
        for k in range(min(128, rounds * block - i)):
            word = words[0] if k < 32 else words[1] if k < 64 else words[2] if k < 96 else words[3]
            masks[i + k] = np.int32((word >> np.uint64(k % 32) & np.uint64(1)) << np.uint64(31))
    return masks


@_njit
def _fetch(ahead, size, tile):
    """Asks for a tile's share of the next group, while this one keeps the arithmetic busy."""
    if size == 4 or tile % 2 == 0:
        simd.prefetch_1kb(ahead + 256 * size * tile, False)


@_njit
def _hold(arrays):
    """Called last with what was used by address only: Numba frees an array after the last mention of its name."""
    return len(arrays)


@_njit
def _array(address, shape, dtype):
    return numba.carray(simd.as_pointer(address), shape, dtype)


@_njit
def _judge(given, z, pitch, to_unit, best, least, room, bits):
    """Into ``best`` for each of 16 blocks the multiplier whose codes have the largest cosine with the block.

    room: 48 fp32 numbers a trial.
    """
    block, trials = given[_BLOCK], given[_TRIALS]
    multipliers = _array(given[_MULTIPLIERS], trials, np.float32)
    units = room[: 16 * trials].reshape(trials, 16)
    sums = room[16 * trials : 48 * trials].reshape(trials, 2, 16)
    sums[:] = 0.0
    for k in range(trials):
        for lane in range(16):
            units[k, lane] = to_unit[lane] * multipliers[k]
    for eighth in range(block // 8):
        chunk = z + 64 * (eighth // 2) + 8 * (eighth % 2) * pitch
        k = 0
        while k < trials:
            units_k, sums_k = _address(units) + 64 * k, _address(sums) + 128 * k
            if trials - k >= 4:
                simd.try_scales(chunk, pitch, units_k, given[_TABLE], sums_k, bits, 4)
                k += 4
            else:
                simd.try_scales(chunk, pitch, units_k, given[_TABLE], sums_k, bits, 1)
                k += 1
    for k in range(trials):
        energy = np.float32(block) * multipliers[k] * multipliers[k]
        for lane in range(16):
            loss, product = sums[k, 0, lane], sums[k, 1, lane]
            # squared sine of the angle between u and its levels q = u - r, from r: no cancellation
            sine = (energy * loss - product * product) / (energy * (energy - 2 * product + loss))
            if k == 0 or sine < least[lane]:
                least[lane] = sine
                best[lane] = multipliers[k]


@_njit
def _judge_in_integers(given, z, pitch, to_unit, best, least, room, bits):
    """The same by integers, as ``tq.quant.scale_search`` says. room: 64 fp32 numbers and 4 times a block."""
    block, trials, table = given[_BLOCK], given[_TRIALS], given[_CUTS]
    unit, sums, steps = _address(room), _address(room) + 64, _address(room) + 64 + 256
    for lane in range(16):
        room[lane] = to_unit[lane] * np.float32(simd.STEPS)
        least[lane] = np.float32(-1.0)
    for c in range(block // 16):
        simd.to_steps(z + 64 * c, pitch, unit, steps + 256 * c, bits)
    k = 0
    while k < trials:
        rows, multiplier = table + 16 + simd.TRIAL_BYTES * k, given[_MULTIPLIERS] + 4 * k
        simd.zero_bytes(sums, 256)
        if trials - k >= 2:
            for part in range(block // 32):
                simd.try_steps(steps + 512 * part, table, rows, sums, bits, 2)
            simd.judge(sums, multiplier, _address(best), _address(least), bits)
            simd.judge(sums + 128, multiplier + 4, _address(best), _address(least), bits)
            k += 2
        else:
            for part in range(block // 32):
                simd.try_steps(steps + 512 * part, table, rows, sums, bits, 1)
            simd.judge(sums, multiplier, _address(best), _address(least), bits)
            k += 1


@_njit
def _encode_room(bits, block, trials):
    """fp32 numbers of the scratch memory that ``_encode_group`` works in."""
    return (18 + len(bits)) * block + 16 * _PAD + 256 + 160 + (48 * trials + 4 * block if trials > 1 else 0)


@_njit
def _encode_group(given, room, masks_at, bits, group):
    """Encode 16 blocks as ``encode`` says. The type of ``bits`` selects the variant.

    given: as ``_PLACES`` says; room: scratch of ``_encode_room`` numbers; masks_at: where ``_sign_masks`` lie.
    """
    source, size, dim, payload, n_blocks, rounds, block = (
        given[_X],
        given[_SIZE],
        given[_DIM],
        given[_PAYLOAD],
        given[_BLOCKS],
        given[_ROUNDS],
        given[_BLOCK],
    )
    scales = _array(given[_SCALE_AT], n_blocks, np.float32)
    multipliers = _array(given[_MULTIPLIERS], given[_TRIALS], np.float32)
    tables_at, scale_kind, kind = given[_TABLE], given[_SCALE], given[_KIND]
    limit, factor = given.view(np.float64)[_LIMIT], given.view(np.float64)[_FACTOR]
    tiles, trials = block // 16, multipliers.shape[0]
    width, pitch = len(bits) * block // 8, 4 * (block + _PAD)
    growth = np.float32(float(block) ** (-0.5 * rounds))  # undoes that of the unnormalised transforms
    root = np.float32(math.sqrt(block))

    z = _address(room)
    words = z + 16 * pitch
    spare_payload = words + 16 * width
    energy_tile = spare_payload + 16 * width
    at = 4 * pitch + 8 * width + 256
    spare, wide = z + 4 * at, z + 4 * (at + block)
    wide_block = room[at + block : at + 2 * block]
    at += 2 * block
    energies, to_unit, best, unit, least = (
        room[at : at + 16],
        room[at + 16 : at + 32],
        room[at + 32 : at + 48],
        room[at + 48 : at + 64],
        room[at + 64 : at + 80],
    )
    sums = room[at + 80 : at + 112].reshape(2, 16)
    keep, powers = room[at + 112 : at + 128].view(np.int32), room[at + 128 : at + 160].view(np.float64)
    at += 160

    n, per_row = group * _GROUP, (dim + block - 1) // block
    rows = min(_GROUP, n_blocks - n)
    row, column = n // per_row, n % per_row * block
    keep[:] = -1
    powers[:] = 1.0
    for r in range(_GROUP):
        if r >= rows:
            simd.zero_bytes(z + pitch * r, 4 * block)
            simd.zero_bytes(energy_tile + 64 * r, 64)
            continue
        address = source + (row * dim + column) * size
        count = min(block, dim - column)
        if count < block:
            simd.zero_bytes(spare, size * block)
            simd.copy_bytes(spare, address, size * count)
            address = spare
        _load_row(address, kind, size, masks_at, z + pitch * r, energy_tile + 64 * r, block)
        column += block
        if column >= dim:
            row, column = row + 1, 0
    simd.sum_rows(energy_tile, _address(energies))

    again = False
    for r in range(rows):
        if 1 / _SAFE < energies[r] < _SAFE:
            continue
        # rare: read the block again, times the power of two that brings its largest magnitude into [1/2, 1)
        its_row, its_column = (n + r) // per_row, (n + r) % per_row * block
        count = min(block, dim - its_column)
        simd.zero_bytes(spare, size * block)
        simd.copy_bytes(spare, source + (its_row * dim + its_column) * size, size * count)
        for i in range(tiles):
            _widen(spare + 16 * size * i, kind, wide + 64 * i)
        largest = _largest(wide_block)
        if largest == 0.0 or math.isnan(largest):
            powers[r] = largest
            wide_block[:] = 0.0
        else:
            exponent = math.frexp(largest)[1]
            powers[r] = math.ldexp(1.0, exponent)
            for i in range(block):
                wide_block[i] = math.ldexp(float(wide_block[i]), -exponent)
        _load_row(wide, simd.FP32, 4, masks_at, z + pitch * r, energy_tile + 64 * r, block)
        again = True
    if again:
        simd.sum_rows(energy_tile, _address(energies))

    for lane in range(16):
        energy = energies[lane]
        to_unit[lane] = root * growth / math.sqrt(energy) if energy > 0 else np.float32(0.0)
        best[lane] = multipliers[0]
    ahead = source + (row * dim + column) * size
    if rounds > 1:
        for c in range(tiles):
            simd.tile(z + 64 * c, pitch, masks_at + 4 * block + 64 * c, "THSH")
        for r in range(_GROUP):
            _across(z + pitch * r, block)
    if rounds > 2:
        for c in range(tiles):
            simd.tile(z + 64 * c, pitch, masks_at + 8 * block + 64 * c, "SH")
        for r in range(_GROUP):
            _across(z + pitch * r, block)
    if trials > 1:
        if rounds == 1:
            for c in range(tiles):
                _fetch(ahead, size, c)
                simd.tile(z + 64 * c, pitch, 0, "TH")
        if len(bits) <= simd.INTEGER_BITS:
            _judge_in_integers(given, z, pitch, to_unit, best, least, room[at:], bits)
        else:
            _judge(given, z, pitch, to_unit, best, least, room[at:], bits)
    for lane in range(16):
        unit[lane] = to_unit[lane] * best[lane]
    sums[:] = 0.0
    simd.zero_bytes(words, 16 * width)
    for c in range(tiles):
        if trials == 1:
            _fetch(ahead, size, c)
            if rounds == 1:
                simd.tile(z + 64 * c, pitch, 0, "TH")
        for half in range(2):
            coordinate = 16 * c + 8 * half
            chunk = z + 64 * c + 8 * half * pitch
            simd.quantize(chunk, pitch, _address(unit), tables_at, _address(sums), words, 2 * block, coordinate, bits)

    for lane in range(16):
        energy, dot, square = energies[lane], sums[0, lane] * growth, sums[1, lane]
        if scale_kind == 0:
            scale = math.sqrt(energy) / root
        elif scale_kind == 1:
            scale = dot / square
        elif scale_kind == 2:
            scale = energy / dot
        else:
            scale = math.sqrt(energy / square)
        power = powers[lane]
        exact = float(scale) * power * factor if power > 0 else power
        if not abs(exact) < limit:
            exact = np.nan
        if not exact > 0:
            keep[lane] = 0
        if lane < rows:
            scales[n + lane] = exact
            if math.isnan(exact):
                given[_LOST] = 1
    if rows == _GROUP:
        _move_words(words, _address(keep), payload + n * width, width, True)
    else:
        _move_words(words, _address(keep), spare_payload, width, True)
        simd.copy_bytes(payload + n * width, spare_payload, rows * width)


@_njit
def _decode_room(bits, block):
    """fp32 numbers of the scratch memory that ``_decode_group`` works in."""
    return (17 + len(bits)) * block + 16 * _PAD


@_njit
def _decode_table(given):
    """The levels, and once more byte by byte.

    They undo the growth of the unnormalised transforms: a tiny scale times that would be subnormal.
    """
    levels = _array(given[_TABLE], given[_ENTRIES], np.float32)
    table = _scratch(2 * levels.size)
    table[: levels.size] = levels * np.float32(float(given[_BLOCK]) ** (-0.5 * given[_ROUNDS]))
    entries, planes = table[: levels.size].view(np.uint8), table[levels.size :].view(np.uint8)
    planes.reshape(4, levels.size)[:] = entries.reshape(levels.size, 4).T
    return table


@_njit
def _decode_group(given, room, masks_at, table_at, bits, group):
    """Decode 16 blocks as ``decode`` says; arguments as of ``_encode_group``, and where ``_decode_table`` lies."""
    target, size, dim, payload, kind = given[_X], given[_SIZE], given[_DIM], given[_PAYLOAD], given[_KIND]
    n_blocks, rounds, block = given[_BLOCKS], given[_ROUNDS], given[_BLOCK]
    scales = _array(given[_SCALE_AT], n_blocks, np.float32)
    limit = np.float32(given.view(np.float64)[_LIMIT])
    tiles = block // 16
    width, pitch = len(bits) * block // 8, 4 * (block + _PAD)
    z = _address(room)
    words = z + 16 * pitch
    spare_words = words + 16 * width
    spare = spare_words + 16 * width

    n, per_row = group * _GROUP, (dim + block - 1) // block
    rows = min(_GROUP, n_blocks - n)
    row, column = n // per_row, n % per_row * block
    if rows == _GROUP:
        _move_words(words, 0, payload + n * width, width, False)
    else:
        simd.zero_bytes(spare_words, 16 * width)
        simd.copy_bytes(spare_words, payload + n * width, rows * width)
        _move_words(words, 0, spare_words, width, False)
    if rounds == 1:
        for c in range(tiles):
            if block > 256 and kind < simd.STREAM:
                simd.prefetch_1kb(target + (row * dim + column + 256 * c) * size, True)
            simd.dequantize(words, 2 * block, c, table_at, z + 64 * c, pitch, bits, "HT")
    else:
        for c in range(tiles):
            simd.dequantize(words, 2 * block, c, table_at, z + 64 * c, pitch, bits, "H")
        for r in range(_GROUP):
            _across(z + pitch * r, block)
        if rounds == 3:
            for c in range(tiles):
                simd.tile(z + 64 * c, pitch, masks_at + 8 * block + 64 * c, "SH")
            for r in range(_GROUP):
                _across(z + pitch * r, block)
        for c in range(tiles):
            simd.tile(z + 64 * c, pitch, masks_at + 4 * block + 64 * c, "SHT")
    for r in range(rows):
        address = target + (row * dim + column) * size
        count = min(block, dim - column)
        z_row = z + pitch * r
        if count == block:
            _store_row(z_row, masks_at, scales[n + r], limit, address, kind, size, block)
        else:
            simd.copy_bytes(spare, address, size * count)
            _store_row(z_row, masks_at, scales[n + r], limit, spare, kind, size, block)
            simd.copy_bytes(address, spare, size * count)
        column += block
        if column >= dim:
            row, column = row + 1, 0


@_njit
def _piece(given):
    """The next (first, last) groups that no thread has taken; first == last when nothing is left."""
    piece = simd.take_next(_address(given))
    if piece >= given[_PIECES]:
        return 0, 0
    return given[_GROUPS] * piece // given[_PIECES], given[_GROUPS] * (piece + 1) // given[_PIECES]


_compiled_kernels: list[Any] = []  # held, or the code that ctypes points to would be freed


@cache
def _kernel(encodes: bool, width: int) -> Callable[[int], None]:
    """The kernel for a number of bits; every thread calls it with the address of the arguments.

    Called through ctypes, so without the GIL; native, so that the threads of a team need no interpreter either.
    """
    bits, stamp = (0,) * width, _STAMP

    def encoder(arguments):  # not split further: Numba makes machine code of each function that another one calls
        given = numba.carray(arguments, _FIELDS)
        masks = _sign_masks(given[_SEED], given[_ROUNDS], given[_BLOCK])
        room = _scratch(_encode_room(bits, given[_BLOCK], given[_TRIALS]))
        while stamp:
            first, last = _piece(given)
            if first == last:
                break
            for group in range(first, last):
                _encode_group(given, room, _address(masks), bits, group)
        _hold((masks, room))

    def decoder(arguments):
        given = numba.carray(arguments, _FIELDS)
        masks = _sign_masks(given[_SEED], given[_ROUNDS], given[_BLOCK])
        room, table = _scratch(_decode_room(bits, given[_BLOCK])), _decode_table(given)
        while stamp:
            first, last = _piece(given)
            if first == last:
                break
            for group in range(first, last):
                _decode_group(given, room, _address(masks), _address(table), bits, group)
        if given[_KIND] >= simd.STREAM:
            simd.fence()
        _hold((masks, room, table))

    compiled = _compiled(encoder if encodes else decoder)
    _compiled_kernels.append(compiled)
    return _KERNEL(compiled.address)


def _look_up(bits: int, thresholds: bytes, levels: bytes) -> np.ndarray:
    """Tables that find the level nearest to u >= 0 by one guess and one comparison; fp32, laid out for ``simd``.

    The guess j = rint(c1 u + c2 u^2 + ...) counts the thresholds below u, or one too many: it is right when the
    polynomial takes the j-th positive threshold to j within 1/2 and rises in between. Comparing u with the j-th then
    settles it, exactly. Coefficients: least maximal error, by Lawson's iterated weights.
    """
    half, degree = 1 << (bits - 1), simd.DEGREE[bits]
    positive = np.frombuffer(thresholds, np.float32)[half:].astype(np.float64)
    edges = np.roll(np.concatenate([[-np.inf], positive]), half - 1)  # entry half - 1 + j: the j-th, again and again
    edges = np.resize(edges, simd.table_size(half))
    magnitudes = np.resize(np.frombuffer(levels, np.float32)[half:], simd.table_size(half))
    if degree == 0:
        return np.concatenate([edges, magnitudes, [0.0]]).astype(np.float32)
    # a line is cut off at the last index, so it may overshoot the last threshold
    fitted, powers = positive[:-1] if degree == 1 and half > 2 else positive, np.arange(1, degree + 1)
    basis = (fitted[:, None] / fitted[-1]) ** powers
    count, weights = np.arange(1.0, fitted.size + 1), np.ones(fitted.size)
    least, best = 0.5, np.zeros(degree)
    for _ in range(200):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(basis * root[:, None], count * root, rcond=None)[0]
        error = np.abs(basis @ coefficients - count)
        if error.max() < least:
            least, best = error.max(), coefficients
        weights = weights * (error + 1e-9) / np.dot(weights, error + 1e-9)
    grid = np.linspace(0.0, 1.0, 4096)[:, None] ** powers @ best
    rises = np.all(np.diff(grid) > 0) and (positive[-1] / fitted[-1]) ** powers @ best > half - 1.45
    if least > 0.45 or not rises:
        raise ValueError(f"no polynomial of degree {degree} guesses the {half} levels of these thresholds")
    return np.concatenate([edges, magnitudes, positive[-1:], best / fitted[-1] ** powers]).astype(np.float32)


@lru_cache(maxsize=64)
def _encoder_tables(bits: int, thresholds: bytes, levels: bytes, search: Search = ((1.0,), (), ())) -> Any:
    """The tables of ``_look_up``, the multipliers, how to judge them in integers, and where all are."""
    tables, (multipliers, cuts, whole) = _look_up(bits, thresholds, levels), search
    trials, judged = np.array(multipliers, np.float32), np.full(16 + simd.TRIAL_BYTES * len(cuts), 127, np.uint8)
    judged[: len(whole)] = whole
    for row, of_trial in zip(judged[16:].reshape(-1, simd.TRIAL_BYTES), np.array(cuts, np.uint8), strict=True):
        for cut in of_trial:
            row[cut // 8] = min(row[cut // 8], cut)  # one at the cell's end counts in the next
        row[16:32] = np.searchsorted(of_trial, np.arange(0, 128, 8))
        row[32 : 32 + of_trial.size] = of_trial
        row[48:] = np.array(whole)[np.searchsorted(of_trial, np.arange(128))]
    where = {
        _TABLE: tables.ctypes.data, _ENTRIES: tables.size, _MULTIPLIERS: trials.ctypes.data, _TRIALS: trials.size,
        _CUTS: judged.ctypes.data,
    }  # fmt: skip
    return where, tables, trials, judged


@lru_cache(maxsize=64)
def _decoder_table(bits: int, levels: bytes) -> np.ndarray:
    """The levels as the decoder reads them: repeated to fill a register, or the positive ones only."""
    table = np.frombuffer(levels, np.float32)
    return np.resize(table[table.size // 2 :] if bits >= simd.SYMMETRIC else table, simd.level_table_size(bits))


try:
    # PyTorch's own OpenMP threads: others would compete with them, as they spin for milliseconds after every operation
    _team = ctypes.CDLL(None).GOMP_parallel
    _team.argtypes, _team.restype = (_KERNEL, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
except (AttributeError, OSError):
    _team = None
_forked = False  # OpenMP's threads do not survive a fork, and asking for them again would wait for ever


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _run(kernel: Any, given: np.ndarray, elements: int) -> None:
    """The kernel on all groups, on as many threads as torch uses."""
    if given.shape != (_FIELDS,) or given.dtype != np.int64 or not given.flags.c_contiguous:
        raise ValueError(f"kernels read {_FIELDS} int64 in a row, got {given.dtype} of shape {given.shape}")
    groups = -(-int(given[_BLOCKS]) // _GROUP)
    if groups == 0:
        return
    threads = 1 if elements < _SMALL or _forked else min(torch.get_num_threads(), groups)
    # more pieces than threads, so that a core that is taken away delays a piece and not a half
    given[_PIECES], given[_GROUPS] = min(groups, 1 if threads == 1 else 16 * threads), groups
    address = given.__array_interface__["data"][0]
    if threads == 1:
        kernel(address)
    elif _team is not None:
        _team(kernel, address, threads, 0)
    else:
        pool = [threading.Thread(target=kernel, args=(address,)) for _ in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()


@cache
def _limit(dtype: torch.dtype) -> float:
    """From here on, half a step above the largest number of the type, values would round to infinity."""
    info = torch.finfo(dtype)
    return float(info.max) * (1.0 + info.eps / 4.0)


def _arguments(values: dict[int, int | float]) -> np.ndarray:
    """The array that a kernel is called with, from values by their places, floats as their bits; 0 elsewhere."""
    given = np.zeros(_FIELDS, np.int64)
    for place, value in values.items():
        (given.view(np.float64) if isinstance(value, float) else given)[place] = value
    return given


def _held_to_memory(*tensors: Tensor) -> None:
    """Raises for tensors that a kernel cannot read by their address: copies on the way to it may be traced ones."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_cpu:
            raise TypeError(f"the CPU kernels work on memory, got {type(tensor).__name__} on {tensor.device}")
        assert tensor.is_contiguous()


def _signed(seed: int) -> int:
    """The int64 with the bits of a seed in [0, 2**64)."""
    return seed - (1 << 64) if seed >> 63 else seed


class _Prepared:
    """Arguments of a kernel that are the same in every call, and what they point at."""

    def __init__(self, values: dict[int, int | float], block: int, rounds: int, bits: int, held: object) -> None:
        self._given = _arguments(values | {_BLOCK: block, _ROUNDS: rounds})
        self._block, self._block_bytes, self._held = block, bits * block // 8, held

    def _filled(self, x_RD: Tensor, payload_NW: Tensor, scales: Tensor, seed: int) -> np.ndarray:
        """All arguments; asserts what the kernels rely on."""
        (rows, dim), count = x_RD.shape, scales.numel()
        _held_to_memory(x_RD, payload_NW, scales)
        assert count == rows * -(-dim // self._block) and payload_NW.nbytes == count * self._block_bytes
        assert scales.dtype == torch.float32
        given = self._given.copy()
        given[_X], given[_PAYLOAD], given[_SCALE_AT] = x_RD.data_ptr(), payload_NW.data_ptr(), scales.data_ptr()
        given[_SIZE], given[_DIM], given[_BLOCKS], given[_SEED] = x_RD.element_size(), dim, count, _signed(seed)
        return given


class Encoder(_Prepared):
    """A codec's encoder for all seeds and tensors, made once: to look its tables up takes longer than a small tensor.

    levels_L and thresholds: fp32, symmetric; scale: "paper", "mse", "unbiased" or "norm"; scale_dtype: fp32 or bf16.
    """

    def __init__(
        self, block: int, rounds: int, bits: int, *, levels_L: Tensor, thresholds: Tensor, search: Search, scale: str,
        scale_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        where, *held = _encoder_tables(bits, thresholds.numpy().tobytes(), levels_L.numpy().tobytes(), search)
        values = where | {_SCALE: _SCALES[scale], _LIMIT: _limit(scale_dtype)}
        super().__init__(values, block, rounds, bits, held)
        self._bits = bits

    def __call__(self, x_RD: Tensor, payload_NW: Tensor, scale_N: Tensor, seed: int, factor: float = 1.0) -> bool:
        """Encode ``factor * x_RD`` [rows, dim] (contiguous; fp32, bf16, fp16) into ``payload_NW`` and ``scale_N``.

        Every row starts a new block. payload_NW: uint8. All on the CPU. Returns whether all scales are finite.
        """
        scales = scale_N if scale_N.dtype == torch.float32 else torch.empty(scale_N.shape, dtype=torch.float32)
        given = self._filled(x_RD, payload_NW, scales, seed)
        given[_KIND] = _KINDS[x_RD.dtype]
        given.view(np.float64)[_FACTOR] = factor
        _run(_kernel(True, self._bits), given, x_RD.numel())
        if scales is not scale_N:
            scale_N.copy_(scales)
        return not given[_LOST]


class Decoder(_Prepared):
    """A codec's decoder for all seeds and tensors; see ``Encoder``."""

    def __init__(self, block: int, rounds: int, bits: int, *, levels_L: Tensor) -> None:
        levels = _decoder_table(bits, levels_L.numpy().tobytes())
        super().__init__({_TABLE: levels.ctypes.data, _ENTRIES: levels.size}, block, rounds, bits, levels)
        self._bits = bits

    def __call__(
        self, payload_NW: Tensor, scale_N: Tensor, out_RD: Tensor, seed: int, accumulate: bool = False
    ) -> None:
        """Decode into ``out_RD`` [rows, dim] (contiguous; fp32, bf16, fp16), or add to it (fp32). All on the CPU."""
        assert not accumulate or out_RD.dtype == torch.float32
        kind = simd.ADD_FP32 if accumulate else _KINDS[out_RD.dtype]
        if not accumulate and out_RD.shape[0] == 1 and out_RD.nbytes >= _LARGE and out_RD.data_ptr() % 64 == 0:
            kind += simd.STREAM
        scales = scale_N.float()
        given = self._filled(out_RD, payload_NW, scales, seed)
        given[_KIND] = kind
        given.view(np.float64)[_LIMIT] = _LARGEST[out_RD.dtype]
        _run(_kernel(False, self._bits), given, out_RD.numel())

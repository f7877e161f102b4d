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
_SCALES = {"paper": 0, "mse": 1, "unbiased": 2, "norm": 3}
_SAFE = np.float32(2.0**60)  # a sum of squares between 1/_SAFE and _SAFE needs no power of two before it
_SMALL = 1 << 17  # elements below which waking other threads costs more than it saves
_LARGE = 1 << 22  # bytes of output that no second cache holds: written past the caches, which need not read it then
_PAD = simd.LANES  # floats between rows of a group, so that powers of two do not share one set of the cache

# Numba keys its disk cache by the code of a function and what it closes over; with the hash of both files among that,
# an edit anywhere in them is seen.
_STAMP = int(
    hashlib.blake2b(b"".join(Path(m).read_bytes() for m in (__file__, simd.__file__)), digest_size=6).hexdigest(), 16
)

# places in the one array of int64 that a kernel is called with; addresses, counts, two float64 (limit, factor), and
# what it answers: whether some scale is not finite
(
    _NEXT, _PIECES, _GROUPS, _X, _SIZE, _DIM, _PAYLOAD, _SCALE_AT, _BLOCKS, _SIGNS, _ROUNDS, _BLOCK, _TABLE, _ENTRIES,
    _MULTIPLIERS, _TRIALS, _SCALE, _STREAM, _LIMIT, _FACTOR, _LOST,
) = range(21)  # fmt: skip
_FIELDS = 21
_SIGNATURE = types.void(types.CPointer(types.int64))
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_njit = numba.njit(error_model="numpy", fastmath={"contract", "nsz"})


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


@_njit
def _sign_masks(signs):
    """What signs [R, B] flip: int32 [R * B] with the top bit set for -1."""
    flat, masks = signs.reshape(signs.size), _scratch(signs.size).view(np.int32)
    for i in range(signs.size):
        masks[i] = np.int32(-2147483648) if flat[i] < 0 else np.int32(0)
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
def _encode_pieces(given, kind, bits):
    """Encode pieces as ``encode`` says until none is left. The types of ``kind`` and ``bits`` select the variant."""
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
    signs = _array(given[_SIGNS], (rounds, block), np.float32)
    multipliers = _array(given[_MULTIPLIERS], given[_TRIALS], np.float32)
    tables_at, scale_kind = given[_TABLE], given[_SCALE]
    limit, factor = given.view(np.float64)[_LIMIT], given.view(np.float64)[_FACTOR]
    tiles, trials = block // 16, multipliers.shape[0]
    width, pitch = len(bits) * block // 8, 4 * (block + _PAD)
    growth = np.float32(float(block) ** (-0.5 * rounds))  # undoes that of the unnormalised transforms
    root = np.float32(math.sqrt(block))

    masks = _sign_masks(signs)
    group_blocks, packed, spare_payload = _scratch(4 * pitch), _scratch(4 * width), _scratch(4 * width)
    partial_energies, spare_block, wide_block = _scratch(256), _scratch(block), _scratch(block)
    energies, to_unit, best, unit, least = _scratch(16), _scratch(16), _scratch(16), _scratch(16), _scratch(16)
    sums, trial_sums = _scratch(32).reshape(2, 16), _scratch(32 * trials).reshape(trials, 2, 16)
    units, keep, powers = _scratch(16 * trials).reshape(trials, 16), np.empty(16, np.int32), np.empty(16, np.float64)
    z, words, masks_at = _address(group_blocks), _address(packed), _address(masks)
    energy_tile, spare, wide = _address(partial_energies), _address(spare_block), _address(wide_block)

    per_row = (dim + block - 1) // block
    while True:
        first, last = _piece(given)
        if first == last:
            break
        row, column = first * _GROUP // per_row, first * _GROUP % per_row * block
        for group in range(first, last):
            n = group * _GROUP
            rows = min(_GROUP, n_blocks - n)
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
                    simd.widen(spare + 16 * size * i, kind, wide + 64 * i)
                largest = _largest(wide_block)
                if largest == 0.0 or math.isnan(largest):
                    powers[r] = largest
                    wide_block[:] = 0.0
                else:
                    exponent = math.frexp(largest)[1]
                    powers[r] = math.ldexp(1.0, exponent)
                    for i in range(block):
                        wide_block[i] = math.ldexp(float(wide_block[i]), -exponent)
                _load_row(wide, np.float32(0), 4, masks_at, z + pitch * r, energy_tile + 64 * r, block)
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
                trial_sums[:] = 0.0
                for k in range(trials):
                    for lane in range(16):
                        units[k, lane] = to_unit[lane] * multipliers[k]
                for c in range(tiles):
                    if rounds == 1:
                        _fetch(ahead, size, c)
                        simd.tile(z + 64 * c, pitch, 0, "TH")
                    for half in range(2):
                        chunk = z + 64 * c + 8 * half * pitch
                        k = 0
                        while k < trials:
                            units_k, sums_k = _address(units) + 64 * k, _address(trial_sums) + 128 * k
                            if trials - k >= 4:
                                simd.try_scales(chunk, pitch, units_k, tables_at, sums_k, bits, 4)
                                k += 4
                            else:
                                simd.try_scales(chunk, pitch, units_k, tables_at, sums_k, bits, 1)
                                k += 1
                for k in range(trials):
                    energy = np.float32(block) * multipliers[k] * multipliers[k]
                    for lane in range(16):
                        loss, product = trial_sums[k, 0, lane], trial_sums[k, 1, lane]
                        # squared sine of the angle between u and its levels q = u - r, from r: no cancellation
                        sine = (energy * loss - product * product) / (energy * (energy - 2 * product + loss))
                        if k == 0 or sine < least[lane]:
                            least[lane] = sine
                            best[lane] = multipliers[k]
            for lane in range(16):
                unit[lane] = to_unit[lane] * best[lane]
            sums[:] = 0.0
            simd.zero_bytes(words, 16 * width)
            for c in range(tiles):
                if trials == 1:
                    _fetch(ahead, size, c)
                if rounds == 1 and trials == 1:
                    simd.tile(z + 64 * c, pitch, 0, "TH")
                for half in range(2):
                    coordinate = 16 * c + 8 * half
                    chunk = z + 64 * c + 8 * half * pitch
                    simd.quantize(
                        chunk, pitch, _address(unit), tables_at, _address(sums), words, 2 * block, coordinate, bits
                    )  # fmt: skip

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
                _move_words(words, _address(keep), _address(spare_payload), width, True)
                simd.copy_bytes(payload + n * width, _address(spare_payload), rows * width)
    _hold((masks, group_blocks, packed, spare_payload, partial_energies, spare_block, wide_block))
    _hold((energies, unit, sums, trial_sums, units, keep))


@_njit
def _decode_pieces(given, kind, bits):
    """Decode pieces as ``decode`` says until none is left."""
    target, size, dim, payload, stream = given[_X], given[_SIZE], given[_DIM], given[_PAYLOAD], given[_STREAM]
    n_blocks, rounds, block = given[_BLOCKS], given[_ROUNDS], given[_BLOCK]
    scales = _array(given[_SCALE_AT], n_blocks, np.float32)
    signs = _array(given[_SIGNS], (rounds, block), np.float32)
    levels = _array(given[_TABLE], given[_ENTRIES], np.float32)
    limit = np.float32(given.view(np.float64)[_LIMIT])
    tiles = block // 16
    width, pitch = len(bits) * block // 8, 4 * (block + _PAD)

    masks = _sign_masks(signs)
    group_blocks, packed = _scratch(4 * pitch), _scratch(4 * width)
    spare_payload, spare_block = _scratch(4 * width), _scratch(block)
    z, words, masks_at = _address(group_blocks), _address(packed), _address(masks)
    spare_words, spare = _address(spare_payload), _address(spare_block)
    # undoes the growth of the unnormalised transforms; in the levels, as a tiny scale times it would be subnormal
    table = np.empty(2 * levels.size, np.float32)
    table[: levels.size] = levels * np.float32(float(block) ** (-0.5 * rounds))
    entries, planes = table[: levels.size].view(np.uint8), table[levels.size :].view(np.uint8)
    planes.reshape(4, levels.size)[:] = entries.reshape(levels.size, 4).T  # and once more byte by byte
    table_at = _address(table)

    per_row = (dim + block - 1) // block
    while True:
        first, last = _piece(given)
        if first == last:
            break
        row, column = first * _GROUP // per_row, first * _GROUP % per_row * block
        for group in range(first, last):
            n = group * _GROUP
            rows = min(_GROUP, n_blocks - n)
            if rows == _GROUP:
                _move_words(words, 0, payload + n * width, width, False)
            else:
                simd.zero_bytes(spare_words, 16 * width)
                simd.copy_bytes(spare_words, payload + n * width, rows * width)
                _move_words(words, 0, spare_words, width, False)
            if rounds == 1:
                for c in range(tiles):
                    if block > 256 and not stream:
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
    if stream:
        simd.fence()
    _hold((masks, group_blocks, packed, spare_payload, spare_block, table))


@_njit
def _piece(given):
    """The next (first, last) groups that no thread has taken; first == last when nothing is left."""
    piece = simd.take_next(_address(given))
    if piece >= given[_PIECES]:
        return 0, 0
    return given[_GROUPS] * piece // given[_PIECES], given[_GROUPS] * (piece + 1) // given[_PIECES]


_compiled_kernels: list[Any] = []  # held, or the code that ctypes points to would be freed


@cache
def _kernel(encodes: bool, element_kind: int, width: int) -> Callable[[int], None]:
    """The kernel for a kind of elements and a number of bits; every thread calls it with the address of the arguments.

    Called through ctypes, so without the GIL; native, so that the threads of a team need no interpreter either.
    """
    kind, bits, stamp = simd.KIND_TAGS[element_kind], (0,) * width, _STAMP

    def encoder(arguments):
        if stamp:
            _encode_pieces(numba.carray(arguments, _FIELDS), kind, bits)

    def decoder(arguments):
        if stamp:
            _decode_pieces(numba.carray(arguments, _FIELDS), kind, bits)

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
    edges = np.full(simd.table_size(half), np.inf, np.float32)
    edges[(half - 1 + np.arange(half)) % edges.size] = np.concatenate([[-np.inf], positive])
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
def _encoder_tables(bits: int, thresholds: bytes, levels: bytes, multipliers: tuple[float, ...]) -> Any:
    """The tables of ``_look_up``, the multipliers, and where both are: address, count, address, count."""
    tables, trials = _look_up(bits, thresholds, levels), np.array(multipliers, np.float32)
    return (tables.ctypes.data, tables.size, trials.ctypes.data, trials.size), tables, trials


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


def encode(
    x_RD: Tensor, payload_NW: Tensor, scale_N: Tensor, signs_RB: Tensor, levels_L: Tensor, thresholds: Tensor,
    multipliers_K: tuple[float, ...], bits: int, scale: str, factor: float = 1.0,
) -> bool:  # fmt: skip
    """Encode ``factor * x_RD`` [rows, dim] (contiguous; fp32, bf16, fp16) into ``payload_NW`` and ``scale_N``.

    Every row starts a new block. payload_NW: uint8; scale_N: fp32 or bf16; signs_RB: fp32, ±1; levels_L and
    thresholds: fp32, symmetric; scale: "paper", "mse", "unbiased" or "norm". All on the CPU. Returns whether all
    scales are finite.
    """
    scales = scale_N if scale_N.dtype == torch.float32 else torch.empty(scale_N.shape, dtype=torch.float32)
    limit = _limit(scale_N.dtype)
    where, *_held = _encoder_tables(bits, thresholds.numpy().tobytes(), levels_L.numpy().tobytes(), multipliers_K)
    given = np.array(
        [
            0, 0, 0, x_RD.data_ptr(), x_RD.element_size(), x_RD.shape[1], payload_NW.data_ptr(), scales.data_ptr(),
            scales.numel(), signs_RB.data_ptr(), *signs_RB.shape, *where, _SCALES[scale], 0, 0, 0, 0,
        ],
        np.int64,
    )  # fmt: skip
    given.view(np.float64)[_LIMIT:_LOST] = limit, factor
    _run(_kernel(True, _KINDS[x_RD.dtype], bits), given, x_RD.numel())
    if scales is not scale_N:
        scale_N.copy_(scales)
    return not given[_LOST]


def decode(
    payload_NW: Tensor, scale_N: Tensor, out_RD: Tensor, signs_RB: Tensor, levels_L: Tensor, bits: int,
    accumulate: bool = False,
) -> None:  # fmt: skip
    """Decode into ``out_RD`` [rows, dim] (contiguous; fp32, bf16, fp16), or add to it (fp32). All on the CPU."""
    scales = scale_N.float()
    levels = _decoder_table(bits, levels_L.numpy().tobytes())
    kind, target = simd.ADD_FP32 if accumulate else _KINDS[out_RD.dtype], out_RD.data_ptr()
    if not accumulate and out_RD.shape[0] == 1 and out_RD.nbytes >= _LARGE and target % 64 == 0:
        kind += simd.STREAM
    given = np.array(
        [
            0, 0, 0, target, out_RD.element_size(), out_RD.shape[1], payload_NW.data_ptr(), scales.data_ptr(),
            scales.numel(), signs_RB.data_ptr(), *signs_RB.shape, levels.ctypes.data, levels.size, 0, 0, 0,
            kind >= simd.STREAM, 0, 0, 0,
        ],
        np.int64,
    )  # fmt: skip
    given.view(np.float64)[_LIMIT] = torch.finfo(out_RD.dtype).max
    _run(_kernel(False, kind, bits), given, out_RD.numel())

"""Numba kernel of AdamW on the CPU: one pass that reads gradient, weight and moments, and writes weight and moments.

Moments in few bits are decoded, updated and coded anew 16 blocks at a time, in first- and second-level cache, by the
very code of ``cpu`` and ``logscale``; so the bits are those of decoding all, updating all and encoding all. Threads
take pieces from a counter, as there.

Shapes: n numbers of a bucket, one flat vector; N = ceil(n / B) blocks, B = 128; S segments (parameters).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from . import cpu, logscale, simd
from .moments import Coded, Settings

BLOCK = 128
_GROUP = 16 * BLOCK
# places in the array of int64 that the kernel is called with; the first three and the block count are those of ``cpu``
_SEGMENTS, _COUNT, _CONSTANTS, _M, _V, _NUMEL, _DIVISOR, _FACTOR, _NEGATED, _SEED, _AT_RANDOM, _STARTED = (
    3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15,
)  # fmt: skip
# of a segment: where it starts and how many numbers it has; addresses; kinds of elements; its row of constants
_START, _SIZE, _P, _G, _P_KIND, _G_KIND, _ROW = range(7)
_WEIGHTS = 4  # what Philox's numbers are for
_FP32, _BF16, _FP16 = (simd.KIND_TAGS[kind] for kind in (simd.FP32, simd.BF16, simd.FP16))
_STAMP = logscale._STAMP ^ int(hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest(), 16)
_njit = numba.njit(error_model="numpy")  # no contraction: the numbers must be the reference's
_ROOM = BLOCK + 16  # fp32 numbers that a run of a block may write


@_njit
def _widened(source, kind, count, raw, target):
    """``count`` elements as fp32 at ``target``; whole vectors are written."""
    if kind == simd.FP32:
        simd.copy_bytes(target, source, 4 * count)
        return
    simd.copy_bytes(raw, source, 2 * count)
    for i in range((count + 15) // 16):
        if kind == simd.BF16:
            simd.widen(raw + 32 * i, _BF16, target + 64 * i)
        else:
            simd.widen(raw + 32 * i, _FP16, target + 64 * i)


@_njit
def _narrowed(source, kind, count, raw, target, dither):
    """Inverse of ``_widened``; dither: where that for bf16 lies, 0 to round to the nearest."""
    if kind == simd.FP32:
        simd.copy_bytes(target, source, 4 * count)
        return
    for i in range((count + 15) // 16):
        if kind == simd.FP16:
            simd.narrow(source + 64 * i, _FP16, raw + 32 * i)
        elif dither == 0:
            simd.narrow(source + 64 * i, _BF16, raw + 32 * i)
        else:
            simd.narrow_at_random(source + 64 * i, dither + 64 * i, raw + 32 * i)
    simd.copy_bytes(target, raw, 2 * count)


@_njit
def _update_run(given, segment, at, count, m, v, room):
    """At most a block of numbers from number ``at`` of the bucket on; m, v: where their fp32 moments lie.

    room: scratch of 6 * _ROOM numbers.
    """
    p_kind, g_kind, offset = segment[_P_KIND], segment[_G_KIND], at - segment[_START]
    p = segment[_P] + offset * (4 if p_kind == simd.FP32 else 2)
    g = segment[_G] + offset * (4 if g_kind == simd.FP32 else 2)
    constants = given[_CONSTANTS] + 32 * segment[_ROW]
    divisor, factor = np.float32(given.view(np.float64)[_DIVISOR]), np.float32(given.view(np.float64)[_FACTOR])
    scaled = divisor != 1 or factor != 1 or given[_NEGATED] != 0
    if p_kind == g_kind == simd.FP32 and not scaled and count == BLOCK:
        simd.adamw(p, g, m, v, constants, 8)
        return
    base = cpu._address(room)
    own_g, own_p, own_m, own_v, raw, dither = (
        base, base + 4 * _ROOM, base + 8 * _ROOM, base + 12 * _ROOM, base + 16 * _ROOM, base + 20 * _ROOM,
    )  # fmt: skip
    _widened(g, g_kind, count, raw, own_g)
    if scaled:
        sign = np.float32(-1.0) if given[_NEGATED] else np.float32(1.0)
        for i in range(count):
            room[i] = room[i] / divisor * factor * sign
    _widened(p, p_kind, count, raw, own_p)
    if count % 16 == 0:
        own_m, own_v = m, v
    else:
        simd.copy_bytes(own_m, m, 4 * count)
        simd.copy_bytes(own_v, v, 4 * count)
    for i in range(0, 4 * count, 64):
        simd.adamw(own_p + i, own_g + i, own_m + i, own_v + i, constants, 1)
    if count % 16:
        simd.copy_bytes(m, own_m, 4 * count)
        simd.copy_bytes(v, own_v, 4 * count)
    if p_kind == simd.BF16 and given[_AT_RANDOM]:
        simd.dither(given[_SEED], at // BLOCK, _WEIGHTS, dither, _BF16)
        _narrowed(own_p, p_kind, count, raw, p, dither + 4 * (at % BLOCK))
    else:
        _narrowed(own_p, p_kind, count, raw, p, 0)


@_njit
def _update_group(given, segments, k, group, m, v, room):
    """The numbers of 16 blocks, in segments from number k on; returns the segment in which they end."""
    at = group * _GROUP
    end, first = min(at + _GROUP, given[_NUMEL]), at
    while at < end:
        while segments[k, _START] + segments[k, _SIZE] <= at:
            k += 1
        count = min(min(end, segments[k, _START] + segments[k, _SIZE]) - at, BLOCK - at % BLOCK)
        if segments[k, _G]:
            offset = 4 * (at - first)
            _update_run(given, segments[k], at, count, m + offset, v + offset, room)
        at += count
    return k


@_njit
def _segments(given):
    return cpu._array(given[_SEGMENTS], (given[_COUNT], 8), np.int64)


@_njit
def _first_segment(segments, at):
    """The last one that starts at ``at`` or before."""
    return np.searchsorted(segments[:, _START], at, side="right") - 1


@_njit
def _move_scales(stored, size, count, scales, back):
    """Scales of 16 blocks between where they are stored, in fp32 or bf16, and fp32 [16]; room for 16 follows that."""
    raw = scales + 64
    if back and size == 2:
        simd.narrow(scales, _BF16, raw)
        simd.copy_bytes(stored, raw, 2 * count)
    elif back:
        simd.copy_bytes(stored, scales, 4 * count)
    elif size == 2:
        simd.copy_bytes(raw, stored, 2 * count)
        simd.widen(raw, _BF16, scales)
    else:
        simd.copy_bytes(scales, stored, 4 * count)


@_njit
def _largest_run(source, kind, count, found):
    bits = cpu._address(found) + 8 * kind
    if kind == simd.FP32:
        _largest_of(source, 4, count, bits, _FP32)
    else:
        _largest_of(source, 2, count, bits, _BF16)  # the bits of fp16 grow with the magnitude too


@_njit
def _largest_of(source, size, count, bits, kind):
    spare, whole = np.zeros(16, np.int32), count - count % 16
    many = whole - whole % 512
    for at in range(0, many, 512):
        simd.largest(source + size * at, bits, kind, 32)
    for at in range(many, whole, 16):
        simd.largest(source + size * at, bits, kind, 1)
    simd.copy_bytes(cpu._address(spare), source + size * whole, size * (count - whole))
    simd.largest(cpu._address(spare), bits, kind, 1)
    cpu._hold((spare, spare))


@_njit
def _arguments_at(address):
    """A copy; of a type for which ``cpu`` is compiled already, as rows of a matrix would not be."""
    return cpu._array(address, cpu._FIELDS, np.int64).copy()


@cache
def _kernel(width: int) -> Callable[[int], None]:
    """The kernel for moments m of ``width`` bits; 0: in fp32; -1: the one that looks for the largest gradients."""
    bits, stamp = (0,) * width, _STAMP

    def largest(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        segments, found = _segments(given), np.zeros(3, np.int64)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            at, end = first * _GROUP, min(last * _GROUP, given[_NUMEL])
            k = _first_segment(segments, at)
            while at < end:
                while segments[k, _START] + segments[k, _SIZE] <= at:
                    k += 1
                upto = min(end, segments[k, _START] + segments[k, _SIZE])
                if segments[k, _G]:
                    kind, offset = segments[k, _G_KIND], at - segments[k, _START]
                    _largest_run(segments[k, _G] + offset * (4 if kind == simd.FP32 else 2), kind, upto - at, found)
                at = upto
        out = cpu._array(given[_M], 3, np.int64)
        for kind in range(3):
            simd.raise_to(cpu._address(out) + 8 * kind, found[kind])
        cpu._hold((found, found))

    def plain(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        segments, room = _segments(given), cpu._scratch(6 * _ROOM)
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            k = _first_segment(segments, first * _GROUP)
            for group in range(first, last):
                offset = 4 * group * _GROUP
                k = _update_group(given, segments, k, group, given[_M] + offset, given[_V] + offset, room)
        cpu._hold((room, room))

    def coded(arguments):
        given = numba.carray(arguments, cpu._FIELDS)
        segments, started = _segments(given), given[_STARTED]
        old, new, old_v, new_v = (
            _arguments_at(given[_M]), _arguments_at(given[_M] + 8 * cpu._FIELDS), _arguments_at(given[_V]),
            _arguments_at(given[_V] + 8 * cpu._FIELDS),
        )  # fmt: skip
        room, scales = cpu._scratch(6 * _ROOM), cpu._scratch(32)
        moments, work = cpu._scratch(2 * _GROUP), cpu._scratch(cpu._encode_room(bits, BLOCK, 1))
        log_room = cpu._scratch(logscale._room(BLOCK))
        m, v, scales_at = cpu._address(moments), cpu._address(moments) + 4 * _GROUP, cpu._address(scales)
        masks = cpu._sign_masks(new[cpu._SEED], 1, BLOCK)
        old_masks, table = cpu._sign_masks(old[cpu._SEED], 1, BLOCK), cpu._decode_table(old)
        size = new[cpu._SIZE]
        new[cpu._SIZE] = old[cpu._SIZE] = 4
        stored, old_stored = new[cpu._SCALE_AT], old[cpu._SCALE_AT]
        while stamp:
            first, last = cpu._piece(given)
            if first == last:
                break
            k = _first_segment(segments, first * _GROUP)
            for group in range(first, last):
                n, offset = 16 * group, 4 * group * _GROUP
                count = min(16, given[cpu._BLOCKS] - n)
                old[cpu._X] = new[cpu._X] = m - offset
                old_v[logscale._V] = new_v[logscale._V] = v - offset
                old[cpu._SCALE_AT] = new[cpu._SCALE_AT] = scales_at - 4 * n
                if started:
                    _move_scales(old_stored + size * n, size, count, scales_at, False)
                    cpu._decode_group(old, work, cpu._address(old_masks), cpu._address(table), bits, group)
                    logscale._decode_group(old_v, log_room, group)
                else:
                    simd.zero_bytes(m, 8 * _GROUP)
                k = _update_group(given, segments, k, group, m, v, room)
                cpu._encode_group(new, work, cpu._address(masks), bits, group)
                _move_scales(stored + size * n, size, count, scales_at, True)
                logscale._encode_group(new_v, log_room, group)
        cpu._hold((room, scales, moments, work))
        cpu._hold((log_room, masks, old_masks, table))

    compiled = cpu._compiled(coded if width > 0 else largest if width else plain)
    cpu._compiled_kernels.append(compiled)
    return cpu._KERNEL(compiled.address)


def step(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], constants: Sequence[Sequence[float]],
    moments: tuple[Tensor, Tensor] | tuple[Coded | None, Coded], settings: Settings | None = None, *,
    divisor: float = 1.0, factor: float = 1.0, negated: bool = False, seed: int | None = None,
) -> None:  # fmt: skip
    """One AdamW step of parameters that lie in a row in the moments, in place. All contiguous and on the CPU.

    parameters: fp32, bf16 or fp16; gradients: likewise, of the same sizes; None leaves a parameter and its moments as
    they are. constants: for each parameter the seven of ``simd.adamw``. moments: fp32 m [n] and v [n], or the codes
    before (None: zeros) and those to write, which may be the same. divisor, factor: g becomes g / divisor * factor;
    negated: and changes its sign. seed: bf16 weights are rounded at random with it, else to the nearest.
    """
    values, *tables = _table(parameters, gradients, constants)
    numel = int(values[_NUMEL])
    values |= {_NEGATED: negated, _AT_RANDOM: seed is not None, _SEED: cpu._signed(seed or 0)}
    held: list[Any] = []
    if settings is None:
        m, v = moments
        assert isinstance(m, Tensor) and isinstance(v, Tensor)
        cpu._held_to_memory(m, v)
        assert m.dtype == v.dtype == torch.float32 and m.numel() == v.numel() == numel
        values |= {_M: m.data_ptr(), _V: v.data_ptr()}
    else:
        before, after = moments
        assert isinstance(after, Coded) and not isinstance(before, Tensor)
        read = _fields(before or after, settings, numel, held, encodes=False)
        written = _fields(after, settings, numel, held, encodes=True)
        of_m, of_v = (np.stack(pair) for pair in zip(read, written, strict=True))
        held += [of_m, of_v]
        values |= {_M: of_m.ctypes.data, _V: of_v.ctypes.data, _STARTED: before is not None}
    given = cpu._arguments(values | {_DIVISOR: float(divisor), _FACTOR: float(factor)})
    cpu._run(_kernel(0 if settings is None else settings.m_bits), given, numel)


def _table(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], constants: Sequence[Sequence[float]]
) -> tuple[dict[int, int], np.ndarray, np.ndarray]:
    """The arguments that say where parameters and gradients lie, and the arrays that they point into."""
    shape, at = (max(1, len(parameters)), 8), 0
    segments, rows = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for k, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        cpu._held_to_memory(p)
        segments[k, :5] = at, p.numel(), p.data_ptr(), 0, cpu._KINDS[p.dtype]
        if g is not None:
            cpu._held_to_memory(g)
            assert g.numel() == p.numel()
            segments[k, _G], segments[k, _G_KIND] = g.data_ptr(), cpu._KINDS[g.dtype]
        segments[k, _ROW], rows[k, :7] = k, constants[k]
        at += p.numel()
    values = {
        _SEGMENTS: segments.ctypes.data, _COUNT: len(parameters), _CONSTANTS: rows.ctypes.data, _NUMEL: at,
        cpu._BLOCKS: -(-at // BLOCK),
    }  # fmt: skip
    return values, segments, rows


def largest(gradients: Sequence[Tensor]) -> float:
    """The greatest magnitude, in one pass; infinity or NaN where one is. fp32, bf16 or fp16, contiguous, on the CPU."""
    values, *tables = _table(gradients, gradients, [(0.0,) * 7] * len(gradients))
    found = np.zeros(3, np.int64)
    cpu._run(_kernel(-1), cpu._arguments(values | {_M: found.ctypes.data}), values[_NUMEL])
    types = {
        simd.FP32: (np.uint32, torch.float32),
        simd.BF16: (np.uint16, torch.bfloat16),
        simd.FP16: (np.uint16, torch.float16),
    }
    numbers = [torch.from_numpy(found[[kind]].astype(raw)).view(dtype).item() for kind, (raw, dtype) in types.items()]
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _fields(
    code: Coded, settings: Settings, numel: int, held: list[Any], encodes: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of ``cpu`` and of ``logscale`` for these codes. held: what must live as long as they."""
    cpu._held_to_memory(*code[:4])
    (block, rounds, seed), blocks, scales = code.rotation, -(-numel // BLOCK), code.scales
    assert block == BLOCK and rounds == 1 and code.payload.nbytes == blocks * settings.m_bits * BLOCK // 8
    assert scales.numel() == blocks and scales.dtype in (torch.float32, torch.bfloat16)
    levels, thresholds = settings.levels_L.numpy().tobytes(), settings.thresholds.numpy().tobytes()
    m = {
        cpu._SIZE: scales.element_size(), cpu._DIM: numel, cpu._PAYLOAD: code.payload.data_ptr(),
        cpu._SCALE_AT: scales.data_ptr(), cpu._BLOCKS: blocks, cpu._SEED: cpu._signed(seed), cpu._ROUNDS: 1,
        cpu._BLOCK: BLOCK, cpu._SCALE: cpu._SCALES[settings.scale],
    }  # fmt: skip
    if encodes:
        where, *tables = cpu._encoder_tables(settings.m_bits, thresholds, levels)
        held.append(tables)
        m |= where
    else:
        table = cpu._decoder_table(settings.m_bits, levels)
        held.append(table)
        m |= {cpu._TABLE: table.ctypes.data, cpu._ENTRIES: table.size}
    largest = cpu._limit(scales.dtype) if encodes else torch.finfo(torch.float32).max
    of_m = cpu._arguments(m | {cpu._LIMIT: largest, cpu._FACTOR: 1.0})
    v = logscale._values(numel, code.codes, code.ranges, BLOCK, settings.v_bits)
    v |= {logscale._SEED: cpu._signed(code.dither), logscale._REACH: settings.octaves * logscale._OCTAVE}
    return of_m, cpu._arguments(v)


assert simd.LANES * BLOCK == _GROUP

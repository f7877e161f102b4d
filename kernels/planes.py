"""Numba kernels of the lossless codec: bits of floating-point numbers split into planes, and a range coder (rANS).

A *step* of a number is its exponent and the first ``STEPS_LOG2`` bits of its mantissa, read as one integer: about
log2 of its magnitude, in quarters of an octave. What the encoder codes is the distance of a step from the step that is
expected of the element's row and column; it follows one narrow distribution, whatever the tensor. All other bits, the
sign among them, are nearly noise and are stored packed.

rANS as in J. Duda, arXiv:1311.2540, in the interleaved form of F. Giesen, arXiv:1402.3392: ``LANES`` states of 32 bits
share one stream of 16-bit words, which the encoder writes from its end, so the decoder reads forwards. What comes out
depends on the numbers alone. The decoder never reads or writes outside of its arrays, whatever it is given.

Everything here is plain Python under Numba's compiler; ``tq.quant.planes`` says the same in NumPy, byte for byte.

Shapes: n elements of a frame, from element ``first`` of the flat tensor on; R rows, C columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from numba import types

from . import cpu

LANES = 32  # states that take turns
PROB_BITS, STATE_BITS = 12, 16  # probabilities are multiples of 2**-12; a state is at least 2**16
STEPS_LOG2 = 2  # mantissa bits in a step
BLOCK = 4096  # elements that are split at a time, in first-level cache
ESCAPE, ZERO, CENTRE = 0, 1, 128  # symbols: the step follows elsewhere; the step 0; the expected step
_TOTAL = 1 << PROB_BITS
CONSTANT, RAW, RANS = range(3)  # ways of a section


_inline = numba.njit(nogil=True, error_model="numpy")


# --- range coder ---------------------------------------------------------------------------------------------------


@_inline
def _frequencies(counts, total, freq):
    """Shares of 256 symbols in units of 2**-12, at least one where a symbol occurs, and exactly 2**12 in all."""
    left = np.int64(_TOTAL)
    for s in range(256):
        freq[s] = 0 if counts[s] == 0 else max(1, (counts[s] * _TOTAL + total // 2) // total)
        left -= freq[s]
    while left != 0:
        largest = 0
        for s in range(256):
            if freq[s] > freq[largest]:
                largest = s
        change = left if left > 0 else -min(-left, freq[largest] // 4)
        freq[largest] += change
        left -= change


@_inline
def _rans_encode(symbols, n, freq, words):
    """Encode ``symbols[:n]``; returns where in ``words`` the stream begins: it ends with the array. States come last
    out of the encoder and first in the stream, as pairs of words."""
    inverse, low, other = np.empty(256, np.float64), np.empty(256, np.uint64), np.empty(256, np.uint64)
    limit = np.empty(256, np.uint64)
    start = np.uint64(0)
    for s in range(256):
        f = np.uint64(freq[s])
        # a little more than 1 / f, so that the product's integer part is the quotient for every state below 2**32
        inverse[s] = (1.0 + 2.0**-50) / max(1.0, float(freq[s]))
        low[s], other[s] = start, np.uint64(_TOTAL) - f
        limit[s] = f << np.uint64(32 - PROB_BITS)
        start += f
    states = np.full(LANES, 1 << STATE_BITS, np.uint32)
    at = words.size
    whole = n // LANES * LANES
    for i in range(n - 1, whole - 1, -1):
        at = _push(states, i - whole, symbols[i], inverse, low, other, limit, words, at)
    for group in range(whole - LANES, -1, -LANES):
        here = symbols[group : group + LANES]
        for lane in range(LANES - 1, -1, -1):
            at = _push(states, lane, here[lane], inverse, low, other, limit, words, at)
    for lane in range(LANES - 1, -1, -1):
        words[at - 1], words[at - 2] = states[lane] >> np.uint32(16), states[lane] & np.uint32(0xFFFF)
        at -= 2
    return at


@_inline
def _push(states, lane, s, inverse, low, other, limit, words, at):
    x = np.uint64(states[lane])
    full = np.int64(x >= limit[s])
    # kept if the state was full, written over if not: no branch
    words[np.uint64(at - 1)] = np.uint16(x & np.uint64(0xFFFF))
    x = x >> np.uint64(16 * full)
    quotient = np.uint64(np.int64(np.float64(np.int64(x)) * inverse[s]))
    states[lane] = np.uint32(x + quotient * other[s] + low[s])
    return at - full


@_inline
def _rans_table(freq, table):
    """Of each remainder: the symbol, its frequency and the offset in it. False if frequencies do not add up."""
    at = 0
    for s in range(256):
        if freq[s] >= _TOTAL or at + freq[s] > _TOTAL:
            return False
        for k in range(freq[s]):
            table[at + k] = np.uint32(s) | np.uint32(k) << np.uint32(8) | np.uint32(freq[s]) << np.uint32(20)
        at += freq[s]
    return at == _TOTAL


@_inline
def _rans_decode(words, table, symbols, n):
    """Decode ``n`` symbols; False if the stream is too short or does not end where it should."""
    if words.size < 2 * LANES:
        return False
    states = np.empty(LANES, np.uint32)
    for lane in range(LANES):
        states[lane] = np.uint32(words[2 * lane]) | np.uint32(words[2 * lane + 1]) << np.uint32(16)
    at, last, whole = 2 * LANES, words.size - 1, n // LANES * LANES
    group = 0
    while group < whole and at + LANES <= last:  # no word beyond the stream can be asked for here
        here = symbols[group : group + LANES]
        for lane in range(LANES):
            x = states[lane]
            entry = table[np.uint32(x & np.uint32(_TOTAL - 1))]
            here[lane] = np.uint8(entry)
            x = np.uint32(
                np.uint32(entry >> np.uint32(20)) * np.uint32(x >> np.uint32(PROB_BITS))
                + np.uint32(np.uint32(entry >> np.uint32(8)) & np.uint32(0xFFF))
            )
            word = np.uint32(words[np.uint64(at)])  # read whether it is used or not: no branch
            short = x < np.uint32(1 << STATE_BITS)
            states[lane] = np.uint32(np.uint32(x << np.uint32(16)) | word) if short else x
            at += np.int64(short)
        group += LANES
    for i in range(group, n):
        x = states[i % LANES]
        entry = table[x & np.uint32(_TOTAL - 1)]
        symbols[i] = np.uint8(entry & np.uint32(0xFF))
        x = (entry >> np.uint32(20)) * (x >> np.uint32(PROB_BITS)) + (entry >> np.uint32(8) & np.uint32(0xFFF))
        if x < np.uint32(1 << STATE_BITS):
            if at > last:
                return False
            x = x << np.uint32(16) | np.uint32(words[at])
            at += 1
        states[i % LANES] = x
    for lane in range(LANES):
        if states[lane] != np.uint32(1 << STATE_BITS):
            return False
    return at == words.size


# --- planes --------------------------------------------------------------------------------------------------------


@_inline
def _pack(values, n, width, out, at):
    """``width`` bits of ``n`` bytes, n a multiple of 8: planes of 4, 2 and 1 bits, each of parts side by side."""
    done = np.uint8(0)
    for plane in (4, 2, 1):
        if width & plane:
            part, parts, mask = n * plane // 8, 8 // plane, np.uint8((1 << plane) - 1)
            target = out[at : at + part]
            for k in range(parts):
                source, shift = values[k * part : (k + 1) * part], np.uint8(plane * k)
                for j in range(part):
                    bits = np.uint8(np.uint8(source[j] >> done) & mask)
                    target[j] = np.uint8(bits << shift) | (target[j] if k else np.uint8(0))
            at += part
            done += np.uint8(plane)
    return at


@_inline
def _unpack(source, at, n, width, values):
    done = np.uint8(0)
    for plane in (4, 2, 1):
        if width & plane:
            part, parts, mask = n * plane // 8, 8 // plane, np.uint8((1 << plane) - 1)
            packed = source[at : at + part]
            for k in range(parts):
                target, shift = values[k * part : (k + 1) * part], np.uint8(plane * k)
                for j in range(part):
                    bits = np.uint8(np.uint8(packed[j] >> shift) & mask)
                    target[j] = np.uint8(bits << done) | (target[j] if done else np.uint8(0))
            at += part
            done += np.uint8(plane)
    return at


@_inline
def _expect(first, n, columns, row_steps, column_steps, given, given_shift, base, expected):
    """The expected steps of elements ``first`` to ``first + n`` of the flat tensor."""
    if row_steps.size:
        i = 0
        while i < n:
            row, column = (first + i) // columns, (first + i) % columns
            here = np.int16(base + row_steps[row])
            count = min(columns - column, n - i)
            target, steps = expected[i : i + count], column_steps[column : column + count]
            for j in range(count):
                target[j] = np.int16(here + np.int16(steps[j]))
            i += count
    else:
        expected[:n] = base
    if given.size:
        magnitude, other, shift = np.uint32(_magnitude(given)), given[first : first + n], np.uint32(given_shift)
        for i in range(n):
            expected[i] += np.int16(np.uint32(np.uint32(other[i]) & magnitude) >> shift)


@_inline
def _magnitude(words):
    """The bits of a word but for the sign."""
    return words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)


@_inline
def _count(symbols, n, counts):
    """Adds up how often each symbol occurs, in four tables, as the same symbol in a row would wait for itself."""
    tables = np.zeros((4, 256), np.uint32)
    for i in range(0, n - 3, 4):
        for k in range(4):
            tables[k, symbols[i + k]] += np.uint32(1)
    for i in range(n // 4 * 4, n):
        tables[0, symbols[i]] += np.uint32(1)
    for s in range(256):
        counts[s] = np.int64(tables[0, s]) + tables[1, s] + tables[2, s] + tables[3, s]


# --- sections: a run of bytes in the way that is shortest ----------------------------------------------------------


@_inline
def _aligned(at):
    return (at + 7) // 8 * 8


@_inline
def _noise(counts, total):
    """Whether symbols that occur so often are as good as random: fewer than a hundredth of them would be saved.

    Of the 8 bits, counting lets ``total`` random ones miss 255 / (2 ln 2 total).
    """
    bits = 0.0
    for s in range(256):
        if counts[s]:
            bits -= counts[s] * np.log2(counts[s] / total)
    return bits > 7.92 * total - 184.0


@_inline
def _put(out, at, method, value, table, length):
    """The eight bytes before a section; returns where the section's bytes begin."""
    out[at], out[at + 1], out[at + 2], out[at + 3] = method, value, table & 0xFF, table >> 8
    for k in range(4):
        out[at + 4 + k] = length >> (8 * k) & 0xFF
    return at + 8


@_inline
def _put_section(data, n, out, at, words):
    """Write ``data[:n]`` as a section at ``out[at:]``, which has room for n + 1,024 bytes; returns where it ends.

    words: at least n + 2 * LANES of them, to work in.
    """
    counts, freq = np.empty(256, np.int64), np.empty(256, np.int64)
    _count(data, n, counts)
    if n == 0 or counts[data[0]] == n:
        return _put(out, at, CONSTANT, data[0] if n else 0, 0, n)
    begin = at + 8
    if not _noise(counts, n):
        _frequencies(counts, n, freq)
        end = begin
        s = 0
        while s < 256:
            if freq[s] == 0:
                run = 1
                while s + run < 256 and freq[s + run] == 0:
                    run += 1
                out[end], out[end + 1] = 0, run - 1
                end, s = end + 2, s + run
            elif freq[s] < 128:
                out[end] = freq[s]
                end, s = end + 1, s + 1
            else:
                out[end], out[end + 1] = 128 | freq[s] >> 8, freq[s] & 0xFF
                end, s = end + 2, s + 1
        table, stream = end - begin, _aligned(end)
        left = _rans_encode(data, n, freq, words)
        nbytes = 2 * (words.size - left)
        if stream + nbytes - begin < n:
            out[end:stream] = 0
            out[stream : stream + nbytes].view(np.uint16)[:] = words[left:]
            _put(out, at, RANS, 0, table, nbytes)
            return _aligned_end(out, stream + nbytes)
    _put(out, at, RAW, 0, 0, n)
    out[begin : begin + n] = data[:n]
    return _aligned_end(out, begin + n)


@_inline
def _aligned_end(out, at):
    end = _aligned(at)
    out[at:end] = 0
    return end


@_inline
def _section(source, at):
    """Of the section at ``source[at:]``: method, value, bytes of its table, bytes of its data, where the next begins.

    Method -1 where the source ends before.
    """
    if at + 8 > source.size:
        return -1, np.uint8(0), 0, 0, at
    method, value = np.int64(source[at]), source[at + 1]
    table = np.int64(source[at + 2]) | np.int64(source[at + 3]) << 8
    length = np.int64(0)
    for k in range(4):
        length |= np.int64(source[at + 4 + k]) << (8 * k)
    end = at + 8
    if method == RAW:
        end += _aligned(length)
    elif method == RANS:
        end += _aligned(table) + _aligned(length)
    if method > RANS or end > source.size:
        return -1, np.uint8(0), 0, 0, at
    return method, value, table, length, end


@_inline
def _get_section(source, at, n, data):
    """Read the section at ``source[at:]`` into ``data[:n]``; returns where it ends, or -1."""
    method, value, table, length, end = _section(source, at)
    if method < 0 or (method != RANS and length != n) or length % 2 * method == RANS:
        return -1
    if method == CONSTANT:
        data[:n] = value
    elif method == RAW:
        data[:n] = source[at + 8 : at + 8 + n]
    else:
        freq, entries = np.zeros(256, np.int64), np.empty(_TOTAL, np.uint32)
        k, last, s = at + 8, at + 8 + table, 0
        while k < last and s < 256:
            if source[k] and source[k] < 128:
                freq[s] = source[k]
                s, k = s + 1, k + 1
                continue
            if k + 1 >= last:
                return -1
            if source[k] == 0:
                s += np.int64(source[k + 1]) + 1
            else:
                freq[s] = np.int64(source[k] & 127) << 8 | source[k + 1]
                s += 1
            k += 2
        begin = at + 8 + _aligned(table)
        stream = source[begin : begin + length].view(np.uint16)
        if s != 256 or k != last or not _rans_table(freq, entries) or not _rans_decode(stream, entries, data, n):
            return -1
    return end


# --- frames --------------------------------------------------------------------------------------------------------


@_inline
def _split(words, first, n, columns, row_steps, column_steps, given, base, shifts, symbols, high, low, escapes):
    """A block of at most BLOCK elements into symbols, the bits above the low bytes (a byte each) and low bytes.

    Returns the number of escapes. ``shifts``: as of ``encode_frame``.
    """
    shift, low_bits, given_shift = shifts
    expected = np.empty(BLOCK, np.int16)
    _expect(first, n, columns, row_steps, column_steps, given, given_shift, base, expected)
    magnitude, sign, block = _magnitude(words), np.uint32(8 * words.itemsize - 1), words[first : first + n]
    kept, sign_at = np.uint32((1 << (shift - low_bits)) - 1), np.uint32(shift - low_bits)
    shift_, low_ = np.uint32(shift), np.uint32(low_bits)
    escaped = np.int32(0)
    for j in range(n):
        word = np.uint32(block[j])
        step = np.int32((word & np.uint32(magnitude)) >> shift_)
        symbol = np.int32(step - np.int32(expected[j]) + np.int32(CENTRE))
        symbol = symbol if np.uint32(symbol - np.int32(2)) < np.uint32(254) else np.int32(ESCAPE)
        symbol = np.int32(ZERO) if step == 0 else symbol
        escaped += np.int32(symbol == ESCAPE)
        symbols[j] = np.uint8(symbol)
        high[j] = np.uint8(np.uint32(np.uint32(word >> low_) & kept) | np.uint32(np.uint32(word >> sign) << sign_at))
    if low_bits:
        for j in range(n):
            low[j] = block[j]
    if escaped:
        k = 0
        for j in range(n):
            if symbols[j] == ESCAPE:
                escapes[k] = (block[j] & magnitude) >> shift
                k += 1
    return escaped


@_inline
def _join(words, first, n, expected, shifts, symbols, high, low, escapes, at):
    """The inverse of ``_split`` for one block, with what is ``expected``; returns how many escapes were read, or -1."""
    shift, low_bits, _ = shifts
    magnitude, sign_at, sign = _magnitude(words), np.uint32(shift - low_bits), np.uint32(8 * words.itemsize - 1)
    kept, block = np.uint32((1 << (shift - low_bits)) - 1), words[first : first + n]
    shift_, low_ = np.uint32(shift), np.uint32(low_bits)
    escaped = np.int32(0)
    for j in range(n):
        symbol = np.int32(symbols[j])
        step = np.uint32(symbol + np.int32(expected[j]) - np.int32(CENTRE))
        step = np.uint32(0) if symbol == ZERO else step
        escaped += np.int32(symbol == ESCAPE)
        above = np.uint32(high[j])
        word = np.uint32(np.uint32(step << shift_) & np.uint32(magnitude))
        word |= np.uint32(np.uint32(above & kept) << low_)
        block[j] = np.uint32(word | np.uint32(np.uint32(above >> sign_at) << sign))
    if low_bits:
        for j in range(n):
            block[j] |= low[j]
    if escaped:
        if at + escaped > escapes.size:
            return -1
        mask = np.uint32((1 << shift) - 1) | ~np.uint32(magnitude)
        for j in range(n):
            if symbols[j] == ESCAPE:
                step = np.uint32(escapes[at]) << np.uint32(shift) & np.uint32(magnitude)
                words[first + j] = np.uint32(words[first + j]) & mask | step
                at += 1
    return escaped


@_inline
def _low_is_noise(words, first, n, shifts):
    """Whether the low bytes of a sample look random: then they are not worth a coder."""
    step = max(1, n // 4096)
    counts = np.empty(256, np.int64)
    sample = np.empty(n // step + 1, np.uint8)
    for shift in range(0, shifts[1], 8):
        size = 0
        for i in range(first, first + n, step):
            sample[size] = words[i] >> shift
            size += 1
        _count(sample, size, counts)
        if size < 2048 or not _noise(counts, size):  # fewer cannot tell: coders are tried
            return False
    return True


@_inline
def _split_frame(words, first, n, columns, row_steps, column_steps, given, base, shifts, signed, symbols, packed, low,
                 escapes):
    """Of ``n`` elements from ``first`` on: symbols, packed high bits, low bytes, and the steps that escaped.

    Returns how many escaped.
    """
    width, high = shifts[0] - shifts[1] + signed, np.zeros(BLOCK, np.uint8)
    escaped, at = 0, 0
    for begin in range(0, n, BLOCK):
        count = min(BLOCK, n - begin)
        escaped += _split(
            words, first + begin, count, columns, row_steps, column_steps, given, base, shifts, symbols[begin:], high,
            low[begin:], escapes[escaped:],
        )  # fmt: skip
        whole = (count + 7) // 8 * 8
        high[count:whole] = 0
        at = _pack(high, whole, width, packed, at)
    return escaped


@_inline
def _join_frame(words, first, n, columns, row_steps, column_steps, given, base, shifts, signed, symbols, packed, low,
                escapes):
    """The inverse of ``_split_frame``; False if not all that escaped is there."""
    width, high, expected = shifts[0] - shifts[1] + signed, np.zeros(BLOCK, np.uint8), np.empty(BLOCK, np.int16)
    at, used = 0, 0
    for begin in range(0, n, BLOCK):
        count = min(BLOCK, n - begin)
        at = _unpack(packed, at, (count + 7) // 8 * 8, width, high)
        _expect(first + begin, count, columns, row_steps, column_steps, given, shifts[2], base, expected)
        here = _join(words, first + begin, count, expected, shifts, symbols[begin:], high, low[begin:], escapes, used)
        if here < 0:
            return False
        used += here
    return used == escapes.size


# --- what is expected ----------------------------------------------------------------------------------------------


@_inline
def _sums(words, first_row, rows, columns, given, usual, shifts, row_sums, column_sums):
    """Adds up the steps of rows and of columns, over those that are expected, the ``usual`` one where it is 0.

    Returns whether any sign is set.
    """
    shift, _, given_shift = shifts
    magnitude, signs = _magnitude(words), words.dtype.type(0)
    over = np.empty(columns, np.int32)
    for row in range(first_row, first_row + rows):
        begin, total = row * columns, np.int64(0)
        for j in range(columns):
            word = words[begin + j]
            signs |= word
            step = np.int32((word & magnitude) >> shift)
            over[j] = np.int32(-(1 << 20)) if step == 0 else step
        if given.size:
            for j in range(columns):
                over[j] -= np.int32((given[begin + j] & magnitude) >> given_shift)
        for j in range(columns):
            step = np.int32(usual) if over[j] < -(1 << 19) else over[j]
            total += step
            column_sums[j] += step
        row_sums[row] = total
    return signs > magnitude


@_inline
def _histogram(words, first, n, columns, row_steps, column_steps, given, base, shifts, counts):
    """Adds up how often each symbol would occur; that of an escape includes what follows elsewhere."""
    shift = shifts[0]
    magnitude, expected = _magnitude(words), np.empty(BLOCK, np.int16)
    for begin in range(first, first + n, BLOCK):
        count = min(BLOCK, first + n - begin)
        _expect(begin, count, columns, row_steps, column_steps, given, shifts[2], base, expected)
        for j in range(count):
            step = np.int32((words[begin + j] & magnitude) >> shift)
            symbol = step - np.int32(expected[j]) + np.int32(CENTRE)
            symbol = symbol if symbol > ZERO and symbol < 256 else np.int32(ESCAPE)
            counts[np.int32(ZERO) if step == 0 else symbol] += 1


# --- for Python ----------------------------------------------------------------------------------------------------

_U8, _U16, _U32, _I8, _I64 = (types.uint8, types.uint16, types.uint32, types.int8, types.int64)
_LOW = {4: _U16, 2: _U8}  # what the low bytes of a word are kept in


def _read(kind: Any) -> Any:
    return types.Array(kind, 1, "C", readonly=True)


def _signature(name: str, word_bytes: int) -> Any:
    """Of a kernel for words of so many bytes, or of bytes where that is 0."""
    word = _U32 if word_bytes == 4 else _U16
    shifts, expected = types.UniTuple(_I64, 3), (_I64, _read(_I8), _read(_I8), _read(word), _I64)
    frame = (_I64, _I64, *expected, shifts)
    of_bytes = {
        "put_section": _I64(_read(_U8), _I64, _U8[::1], _I64, _U16[::1]),
        "get_section": _I64(_read(_U8), _I64, _I64, _U8[::1]),
    }
    if word_bytes == 0:
        return of_bytes[name]
    low = _LOW[word_bytes]
    return {
        "low_is_noise": types.boolean(_read(word), _I64, _I64, shifts),
        "split_frame": _I64(_read(word), *frame, _I64, _U8[::1], _U8[::1], low[::1], _U16[::1]),
        "join_frame": types.boolean(word[::1], *frame, _I64, _read(_U8), _read(_U8), _read(low), _read(_U16)),
        "sums": types.boolean(_read(word), _I64, _I64, _I64, _read(word), _I64, shifts, _I64[::1], _I64[::1]),
        "histogram": types.void(_read(word), *frame, _I64[::1]),
    }[name]


@cache
def _kernel(name: str, word_bytes: int) -> Callable[..., Any]:
    """A compiled kernel, which runs outside of the interpreter lock. word_bytes: 4, 2, or 0 for the two of bytes."""
    body, options = globals()["_" + name].py_func, {"nogil": True, "error_model": "numpy"}
    try:
        compiled = numba.njit(_signature(name, word_bytes), cache=True, **options)(body)
    except RuntimeError as error:  # "cannot cache function ...: no locator available"
        warnings.warn(f"compiled CPU kernels cannot be kept ({error})", RuntimeWarning, stacklevel=2)
        compiled = numba.njit(_signature(name, word_bytes), **options)(body)
    cpu._compiled_kernels.append(SimpleNamespace(cache_hits=sum(compiled.stats.cache_hits.values())))
    return compiled


NAMES = [(name, 0) for name in ("put_section", "get_section")] + [
    (name, size) for size in (4, 2) for name in ("low_is_noise", "split_frame", "join_frame", "sums", "histogram")
]


def put_section(data, n, out, at, words):
    return _kernel("put_section", 0)(data, n, out, at, words)


def get_section(source, at, n, data):
    return _kernel("get_section", 0)(source, at, n, data)


def low_is_noise(words, span, layout):
    return _kernel("low_is_noise", words.itemsize)(words, *span, tuple(layout))


def split_frame(words, span, expected, layout, signed, planes):
    return _kernel("split_frame", words.itemsize)(words, *span, *expected, tuple(layout), signed, *planes)


def join_frame(words, span, expected, layout, signed, planes):
    return _kernel("join_frame", words.itemsize)(words, *span, *expected, tuple(layout), signed, *planes)


def sums(words, rows, expected, layout, row_sums, column_sums):
    columns, _, _, given, base = expected
    kernel = _kernel("sums", words.itemsize)
    return kernel(words, *rows, columns, given, base, tuple(layout), row_sums, column_sums)


def histogram(words, span, expected, layout, counts):
    _kernel("histogram", words.itemsize)(words, *span, *expected, tuple(layout), counts)

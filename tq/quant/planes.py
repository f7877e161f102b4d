"""What the lossless codec does to the bits of a frame, in NumPy: the words that ``kernels/planes.py`` writes, slowly.

Where Numba is missing, this is what encodes and decodes. The tests hold the two together byte for byte. What a step, a
symbol and a section are is told there and in ``tq.quant.lossless``.

Shapes: n elements of a frame, from element ``first`` of the flat tensor on; R rows, C columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LANES, BLOCK = 32, 4096
PROB_BITS, STATE_BITS = 12, 16
ESCAPE, ZERO, CENTRE = 0, 1, 128  # symbols: the step follows elsewhere; the step 0; the expected step
CONSTANT, RAW, RANS = range(3)  # ways of a section
_TOTAL = 1 << PROB_BITS
_HEAD = 8  # bytes before a section: way, value, size of its table (2), size of its data (4)


class Span(NamedTuple):
    """Elements ``first`` to ``first + n`` of the flat tensor."""

    first: int
    n: int


class Expected(NamedTuple):
    """What the step of element (row, column) is expected to be: the sum of what is here, as far as there is any.

    given: words of another tensor, whose root's step is added; row_steps, column_steps: int8.
    """

    columns: int
    row_steps: Array
    column_steps: Array
    given: Array
    base: int


class Layout(NamedTuple):
    """Where the parts of a word lie: places of its step and of the root's step, and bits below it in whole bytes."""

    shift: int
    low_bits: int
    given_shift: int


class Planes(NamedTuple):
    """The parts of a frame, or room for them: n uint8, their packed high bits, n low words, and steps as uint16."""

    symbols: Array
    packed: Array
    low: Array
    escapes: Array


def aligned(size: int) -> int:
    """The next multiple of 8."""
    return (size + 7) // 8 * 8


# --- range coder ---------------------------------------------------------------------------------------------------


def _frequencies(counts: Array) -> Array:
    total = int(counts.sum())
    freq = np.where(counts == 0, 0, np.maximum(1, (counts * _TOTAL + total // 2) // total))
    left = _TOTAL - int(freq.sum())
    while left:
        largest = int(freq.argmax())
        change = left if left > 0 else -min(-left, int(freq[largest]) // 4)
        freq[largest] += change
        left -= change
    return freq


def _rans_encode(symbols: Array, freq: Array) -> Array:
    """The words of the stream: 32 states as pairs of words, then what the decoder takes up."""
    start = np.cumsum(freq) - freq
    states = np.full(LANES, 1 << STATE_BITS, np.int64)
    pieces = []
    for group in range((symbols.size - 1) // LANES * LANES, -1, -LANES):
        here = symbols[group : group + LANES]
        f, x = freq[here], states[: here.size]
        full = x >= f << (32 - PROB_BITS)
        pieces.append((x[full] & 0xFFFF).astype(np.uint16))
        x = np.where(full, x >> 16, x)
        states[: here.size] = (x // f << PROB_BITS) + x % f + start[here]
    pairs = np.stack([states & 0xFFFF, states >> 16], axis=1).astype(np.uint16).ravel()
    return np.concatenate([pairs, *reversed(pieces)])


def _rans_decode(words: Array, freq: Array, n: int) -> Array | None:
    """``n`` symbols, or None if the stream is not of so many."""
    if words.size < 2 * LANES or freq.sum() != _TOTAL or freq.max() >= _TOTAL:
        return None
    symbol_of = np.repeat(np.arange(256), freq)
    offset = np.arange(_TOTAL) - np.repeat(np.cumsum(freq) - freq, freq)
    states = words[0 : 2 * LANES : 2].astype(np.int64) | words[1 : 2 * LANES : 2].astype(np.int64) << 16
    symbols, at = np.empty(n, np.uint8), 2 * LANES
    for group in range(0, n, LANES):
        x = states[: min(LANES, n - group)]
        slot = x & (_TOTAL - 1)
        here = symbol_of[slot]
        symbols[group : group + x.size] = here
        x = freq[here] * (x >> PROB_BITS) + offset[slot]
        short = np.flatnonzero(x < 1 << STATE_BITS)
        if at + short.size > words.size:
            return None
        x[short] = x[short] << 16 | words[at : at + short.size]
        at += short.size
        states[: x.size] = x
    return symbols if at == words.size and (states == 1 << STATE_BITS).all() else None


# --- sections ------------------------------------------------------------------------------------------------------


def _noise(counts: Array) -> bool:
    some = counts[counts > 0]
    total = counts.sum()
    return -float((some * np.log2(some / total)).sum()) > 7.92 * total - 184.0


def _table(freq: Array) -> bytes:
    """Frequencies, one or two bytes each; 0 is followed by how many more of them there are."""
    written, s = bytearray(), 0
    while s < 256:
        f = int(freq[s])
        if f == 0:
            run = 1
            while s + run < 256 and freq[s + run] == 0:
                run += 1
            written += bytes((0, run - 1))
            s += run
        else:
            written += bytes((f,)) if f < 128 else bytes((128 | f >> 8, f & 0xFF))
            s += 1
    return bytes(written)


def _frequencies_of(table: Array) -> Array | None:
    freq, s, k = np.zeros(256, np.int64), 0, 0
    while k < table.size and s < 256:
        first = int(table[k])
        if 0 < first < 128:
            freq[s], s, k = first, s + 1, k + 1
            continue
        if k + 1 >= table.size:
            return None
        if first == 0:
            s += int(table[k + 1]) + 1
        else:
            freq[s], s = (first & 127) << 8 | int(table[k + 1]), s + 1
        k += 2
    return freq if s == 256 and k == table.size else None


def put_head(out: Array, at: int, head: tuple[int, int, int, int]) -> int:
    """What comes before the bytes of a section: way, value, size of the table, size of the data."""
    method, value, table, length = head
    out[at : at + 4] = method, value, table & 0xFF, table >> 8
    out[at + 4 : at + 8] = np.frombuffer(length.to_bytes(4, "little"), np.uint8)
    return at + _HEAD


def _put(out: Array, at: int, head: tuple[int, int, int, int], *parts: bytes | Array) -> int:
    at = put_head(out, at, head)
    for part in parts:
        data = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part.view(np.uint8)
        out[at : at + aligned(data.size)] = 0
        out[at : at + data.size] = data
        at += aligned(data.size)
    return at


def put_section(data: Array, n: int, out: Array, at: int, _: Array) -> int:
    """Write the bytes ``data[:n]`` at ``out[at:]``, which has room for n + 1,024: one value, as they are, or coded.

    Returns where the section ends.
    """
    data = data[:n]
    counts = np.bincount(data, minlength=256)
    if n == 0 or counts[data[0]] == n:
        return _put(out, at, (CONSTANT, int(data[0]) if n else 0, 0, n))
    if not _noise(counts):
        freq = _frequencies(counts)
        table, words = _table(freq), _rans_encode(data, freq)
        if aligned(len(table)) + words.nbytes < n:
            return _put(out, at, (RANS, 0, len(table), words.nbytes), table, words)
    return _put(out, at, (RAW, 0, 0, n), data)


def get_section(source: Array, at: int, n: int, data: Array) -> int:
    """Read the section at ``source[at:]`` into ``data[:n]``; returns where it ends, or -1 where it is not one."""
    if at + _HEAD > source.size:
        return -1
    method, value, low, high = (int(byte) for byte in source[at : at + 4])
    table, length = low | high << 8, int.from_bytes(source[at + 4 : at + 8].tobytes(), "little")
    begin = at + _HEAD
    stream = begin + (aligned(table) if method == RANS else 0)
    end = begin if method == CONSTANT else stream + aligned(length)
    if method > RANS or end > source.size or (method != RANS and length != n):
        return -1
    if method == CONSTANT:
        data[:n] = value
    elif method == RAW:
        data[:n] = source[begin : begin + n]
    else:
        freq = _frequencies_of(source[begin : begin + table]) if length % 2 == 0 else None
        words = source[stream : stream + length // 2 * 2].copy().view(np.uint16)
        found = None if freq is None else _rans_decode(words, freq, n)
        if found is None:
            return -1
        data[:n] = found
    return end


# --- frames --------------------------------------------------------------------------------------------------------


def _pack(values: Array, width: int) -> Array:
    """``width`` bits of bytes, a multiple of 8 of them: planes of 4, 2 and 1 bits, each of parts side by side."""
    planes, done = [], 0
    for plane in (4, 2, 1):
        if width & plane:
            parts = (values >> done & (1 << plane) - 1).reshape(8 // plane, -1)
            planes.append(np.bitwise_or.reduce([part << plane * k for k, part in enumerate(parts)]).astype(np.uint8))
            done += plane
    return np.concatenate([values[:0], *planes])


def _unpack(packed: Array, n: int, width: int) -> Array:
    values, done, at = np.zeros(n, np.uint8), 0, 0
    for plane in (4, 2, 1):
        if width & plane:
            part = packed[at : at + n * plane // 8]
            parts = [part >> plane * k & (1 << plane) - 1 for k in range(8 // plane)]
            values |= (np.concatenate(parts) << done).astype(np.uint8)
            at, done = at + part.size, done + plane
    return values


def _magnitude(words: Array) -> int:
    return (1 << 8 * words.itemsize - 1) - 1


def _expect(span: Span, expected: Expected, layout: Layout) -> Array:
    """The expected steps of the elements."""
    first, n = span
    steps = np.full(n, expected.base, np.int64)
    if expected.row_steps.size:
        at = np.arange(first, first + n)
        steps += expected.row_steps[at // expected.columns]
        steps += expected.column_steps[at % expected.columns]
    if expected.given.size:
        given = expected.given[first : first + n] & _magnitude(expected.given)
        steps += given.astype(np.int64) >> layout.given_shift
    return steps


def _symbols(words: Array, expected: Array, shift: int) -> tuple[Array, Array]:
    steps = (words & _magnitude(words)).astype(np.int64) >> shift
    symbols = steps - expected + CENTRE
    symbols[(symbols <= ZERO) | (symbols > 255)] = ESCAPE
    symbols[steps == 0] = ZERO
    return symbols.astype(np.uint8), steps


def low_is_noise(words: Array, span: Span, layout: Layout) -> bool:
    """Whether the low bytes of a sample look random: then they are not worth a coder."""
    sample = words[span.first : span.first + span.n : max(1, span.n // 4096)]
    planes = [sample >> shift & 0xFF for shift in range(0, layout.low_bits, 8)]
    return all(len(sample) >= 2048 and _noise(np.bincount(plane, minlength=256)) for plane in planes)


def split_frame(words: Array, span: Span, expected: Expected, layout: Layout, signed: int, planes: Planes) -> int:
    """The elements of ``span`` in planes, signs only if they are ``signed``; returns how many steps escaped."""
    first, n = span
    some = words[first : first + n]
    planes.symbols[:n], steps = _symbols(some, _expect(span, expected, layout), layout.shift)
    escaped = steps[planes.symbols[:n] == ESCAPE]
    planes.escapes[: escaped.size] = escaped
    above = layout.shift - layout.low_bits
    high = some >> layout.low_bits & (1 << above) - 1 | some >> 8 * words.itemsize - 1 << above
    if layout.low_bits:
        planes.low[:n] = some & (1 << layout.low_bits) - 1
    at = 0
    for begin in range(0, n, BLOCK):
        block = high[begin : begin + BLOCK].astype(np.uint8)
        part = _pack(np.pad(block, (0, -block.size % 8)), above + signed)
        planes.packed[at : at + part.size] = part
        at += part.size
    return int(escaped.size)


def join_frame(words: Array, span: Span, expected: Expected, layout: Layout, signed: int, planes: Planes) -> bool:
    """The inverse of ``split_frame``, into ``words``; False if not all that escaped is there."""
    first, n = span
    above, width = layout.shift - layout.low_bits, layout.shift - layout.low_bits + signed
    symbols, steps = planes.symbols[:n], _expect(span, expected, layout)
    steps += symbols.astype(np.int64) - CENTRE
    steps[symbols == ZERO] = 0
    if (symbols == ESCAPE).sum() != planes.escapes.size:
        return False
    steps[symbols == ESCAPE] = planes.escapes
    high, at = np.empty(n, np.int64), 0
    for begin in range(0, n, BLOCK):
        count = min(BLOCK, n - begin)
        nbytes = aligned(count) * width // 8
        high[begin : begin + count] = _unpack(planes.packed[at : at + nbytes], aligned(count), width)[:count]
        at += nbytes
    bits = steps << layout.shift & _magnitude(words) | (high & (1 << above) - 1) << layout.low_bits
    bits |= high >> above << 8 * words.itemsize - 1
    words[first : first + n] = bits | planes.low[:n] if layout.low_bits else bits
    return True


# --- what is expected ----------------------------------------------------------------------------------------------


def sums(words: Array, rows: Span, expected: Expected, layout: Layout, row_sums: Array, column_sums: Array) -> bool:
    """Adds up the steps of rows and of columns, over those of the given tensor, and ``base`` where a step is 0.

    Returns whether any sign is set.
    """
    columns = expected.columns
    span = Span(rows.first * columns, rows.n * columns)
    some = words[span.first : span.first + span.n]
    steps = (some & _magnitude(words)).astype(np.int64) >> layout.shift
    nothing = np.zeros(0, np.int8)
    over = steps - _expect(span, expected._replace(row_steps=nothing, column_steps=nothing, base=0), layout)
    over = np.where(steps == 0, expected.base, over).reshape(rows.n, columns)
    row_sums[rows.first : rows.first + rows.n] = over.sum(1)
    column_sums += over.sum(0)
    return bool((some > _magnitude(words)).any())


def histogram(words: Array, span: Span, expected: Expected, layout: Layout, counts: Array) -> None:
    """Adds up how often each symbol would occur."""
    some = words[span.first : span.first + span.n]
    counts += np.bincount(_symbols(some, _expect(span, expected, layout), layout.shift)[0], minlength=256)

"""Lossless codes of weights, gradients and moments: what comes out of the decoder is what went in, to the bit.

Of a floating-point number, the sign and most of the mantissa are noise that no codec shortens. What can be predicted is
its magnitude: here the *step*, which is the exponent with two bits of the mantissa, about log2 of the magnitude in
quarters of an octave. It is expected from the mean step of the element's row and of its column, and for a gradient or
a first moment also from the root of the second moment of the same element. The distance from what is expected follows
one narrow distribution, which a range coder brings to its entropy (``tq.quant.planes``; compiled: ``kernels/planes``).
All other bits are packed. Numbers of other kinds are coded byte plane by byte plane.

The tensor is cut into *frames* of 2**18 elements that can be decoded alone. Means are integers, so the bytes depend on
the numbers only: not on threads, processors or libraries.

Sources: Duda, arXiv:1311.2540 (the range coder); Hershcovitch et al., arXiv:2411.05239 (ZipNN: exponents coded apart);
Shazeer and Stern, arXiv:1804.04235 (rows and columns predict second moments).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tq.quant import planes as in_numpy
from tq.quant.planes import Array, Expected, Layout, Planes, Span, aligned

FRAME = 1 << 18  # elements
_SAMPLE_RUNS, _SAMPLE_RUN = 16, 1024  # elements that tell which prediction is the best
_FEWEST = 4096  # elements below which means of rows and columns cost more than they save
_STEP_BITS = 2
_LAYOUTS = {  # by dtype: word, mantissa bits, bits in whole bytes below the step and what is packed
    torch.float32: (np.uint32, 23, 16),
    torch.bfloat16: (np.uint16, 7, 0),
    torch.float16: (np.uint16, 10, 8),
}
_NONE = np.zeros(0, np.int8)


class CorruptCode(ValueError):
    """A code that no encoder made: it was damaged, or belongs to other arguments."""


@dataclass(frozen=True)
class Encoded:
    """A tensor in lossless code.

    Example:
        >>> import torch
        >>> from tq.quant import lossless
        >>> code = lossless.encode(torch.zeros(1000, 1000))
        >>> code.numel, code.nbytes < 1000
        (1000000, True)

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        frames: codes of ``FRAME`` elements each, of the tensor's flat order; one of as many bytes as its elements is
            these elements.
        base: the step that is expected before rows and columns are looked at; 0 where nothing is predicted.
        signed: whether signs are stored.
        steps: int8 for every row, then for every column, that are added to ``base``; empty if they would not pay.
        given: whether the second moment is needed to decode.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    frames: tuple[bytes | memoryview, ...]
    base: int = 0
    signed: bool = True
    steps: bytes | memoryview = b""
    given: bool = False

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the code: frames and steps."""
        return len(self.steps) + sum(len(frame) for frame in self.frames)


def encode(tensor: Tensor, *, second_moment: Tensor | None = None, threads: int | None = None) -> Encoded:
    """Code of ``tensor``, which is only read.

    Args:
        tensor: of any shape and dtype, on any device. fp32, bf16 and fp16 are predicted; of other kinds each byte plane
            is coded by itself.
        second_moment: of the same shape and dtype. The magnitudes of ``tensor`` are expected to follow its root:
            AdamW's v for a gradient or for m. It is needed again to decode, if it helped (``Encoded.given``).
        threads: that work at the same time; None: as many as PyTorch uses. The code does not depend on it.

    Raises:
        ValueError: for a second moment of another shape or dtype.

    Example:
        >>> import torch
        >>> from tq.quant import lossless
        >>> weights = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
        >>> code = lossless.encode(weights)
        >>> round(weights.nbytes / code.nbytes, 2)
        1.21
        >>> bool((lossless.decode(code) == weights).all())
        True
    """
    words = _words(tensor)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if second_moment is not None and (second_moment.shape != tensor.shape or second_moment.dtype != dtype):
        raise ValueError(
            f"second_moment must be {dtype} of shape {shape} like the tensor, "
            f"got {second_moment.dtype} of shape {tuple(second_moment.shape)}"
        )
    if dtype not in _LAYOUTS or words.size == 0:
        return Encoded(dtype, shape, tuple(_each(_put_bytes, words, _spans(words.size), threads)))
    given = _words(second_moment) if second_moment is not None else words[:0]
    layout = _layout(dtype)
    expected, signed = _predict(words, shape, given, layout, threads)
    steps = expected.row_steps.tobytes() + expected.column_steps.tobytes()

    def put(words: Array, span: Span) -> bytes:
        return _put_frame(words, span, expected, layout, signed)

    frames = tuple(_each(put, words, _spans(words.size), threads))
    return Encoded(dtype, shape, frames, expected.base, bool(signed), steps, bool(expected.given.size))


def decode(
    code: Encoded,
    *,
    second_moment: Tensor | None = None,
    rows: tuple[int, int] | None = None,
    threads: int | None = None,
    check: Callable[[int, memoryview], bool] | None = None,
) -> Tensor:
    """The tensor of a code, on the CPU.

    Args:
        code: of ``encode``.
        second_moment: that the encoder was given, where ``code.given``. Of another, the outcome is other numbers.
        rows: first and last (exclusive) index along the first dimension, the only ones to decode; None: all.
        threads: as of ``encode``.
        check: is asked of every frame that was decoded, with its number and its bytes, whether they are right.

    Returns:
        Tensor of ``code.dtype`` and ``code.shape``, or of the rows asked for.

    Raises:
        CorruptCode: where ``check`` says so, or a frame is damaged in a way that the decoder notices without.
        ValueError: where the second moment is missing or not of the tensor's shape and dtype, or rows are out of range.

    Example:
        >>> import torch
        >>> from tq.quant import lossless
        >>> code = lossless.encode(torch.arange(12).reshape(4, 3))
        >>> lossless.decode(code, rows=(1, 2))
        tensor([[3, 4, 5]])
    """
    if code.given and second_moment is None:
        raise ValueError("this code needs the second moment that it was made with")
    if code.given and second_moment is not None:
        if tuple(second_moment.shape) != code.shape or second_moment.dtype != code.dtype:
            raise ValueError(f"second_moment must be {code.dtype} of shape {code.shape}")
    spans = _spans(code.numel)
    if len(spans) != len(code.frames):
        raise CorruptCode(f"{len(code.frames)} frames, and shape {code.shape} has {len(spans)}")
    whole = torch.empty(code.shape, dtype=code.dtype)
    first, last = (0, code.numel) if rows is None else _elements(code.shape, rows)
    wanted = [k for k, span in enumerate(spans) if span.first < last and span.first + span.n > first]
    words = _words(whole)
    if code.dtype not in _LAYOUTS or code.numel == 0:
        get: Callable[[Array, Span, Any], bool] = _get_bytes
    else:
        expected, layout = _expected(code, second_moment), _layout(code.dtype)

        def get(words: Array, span: Span, frame: Any) -> bool:
            return _get_frame(words, span, frame, (expected, layout, int(code.signed)))

    def read(words: Array, number: int) -> bool:
        span = spans[number]
        right = get(words, span, np.frombuffer(code.frames[number], np.uint8))
        return right and (check is None or check(number, words[span.first : span.first + span.n].view(np.uint8).data))

    for number, right in zip(wanted, _each(read, words, wanted, threads), strict=True):
        if not right:
            raise CorruptCode(f"frame {number} of a tensor of shape {code.shape} is damaged")
    return whole if rows is None else whole[rows[0] : rows[1]].clone()


# --- frames --------------------------------------------------------------------------------------------------------


def _spans(numel: int) -> list[Span]:
    return [Span(first, min(FRAME, numel - first)) for first in range(0, numel, FRAME)]


def _put_frame(words: Array, span: Span, expected: Expected, layout: Layout, signed: int) -> bytes:
    kernels, room, n = _kernels(), _room(), span.n
    low_bytes, width = layout.low_bits // 8, layout.shift - layout.low_bits + signed
    padded, out = aligned(n), room.out
    together = low_bytes == 0 or kernels.low_is_noise(words, span, layout)
    low = out[16 : 16 + low_bytes * n] if together and low_bytes else room.low
    planes = Planes(room.symbols[:padded], room.packed, low.view(_low_word(words)), room.escapes)
    escaped = kernels.split_frame(words, span, expected, layout, signed, planes)
    out[:8] = np.frombuffer(escaped.to_bytes(4, "little") + bytes((together, 0, 0, 0)), np.uint8)
    at = 8
    if together:
        at = in_numpy.put_head(out, at, (in_numpy.RAW, 0, 0, n * low_bytes))
        at += aligned(n * low_bytes)
        out[16 + n * low_bytes : at] = 0
    else:
        for k in range(low_bytes):
            plane = np.ascontiguousarray(planes.low[:n] >> 8 * k, dtype=np.uint8)
            at = kernels.put_section(plane, n, out, at, room.words)
    at = kernels.put_section(room.packed, padded * width // 8, out, at, room.words)
    at = kernels.put_section(room.escapes.view(np.uint8), 2 * escaped, out, at, room.words)
    at = kernels.put_section(room.symbols, n, out, at, room.words)
    return _shorter(out[:at], words, span)


def _get_frame(words: Array, span: Span, frame: Array, how: tuple[Expected, Layout, int]) -> bool:
    (expected, layout, signed), n = how, span.n
    if frame.size == n * words.itemsize:
        words[span.first : span.first + n] = frame.view(words.dtype)
        return True
    kernels, room = _kernels(), _room()
    low_bytes, width = layout.low_bits // 8, layout.shift - layout.low_bits + signed
    packed_size = aligned(n) * width // 8
    escaped = int.from_bytes(frame[:4].tobytes(), "little")
    if frame.size < 16 or escaped > n:
        return False
    low, at = room.low, 8
    if frame[4]:
        low, at = _find(frame, at, n * low_bytes, room.low)
    else:
        low16 = low.view(_low_word(words))
        low16[:n] = 0
        for k in range(low_bytes):
            at = kernels.get_section(frame, at, n, room.symbols) if at >= 0 else -1
            low16[:n] |= room.symbols[:n].astype(low16.dtype) << low16.dtype.type(8 * k)
    packed, at = _find(frame, at, packed_size, room.packed)
    steps = room.escapes[:escaped]
    at = kernels.get_section(frame, at, 2 * escaped, steps.view(np.uint8)) if at >= 0 else -1
    at = kernels.get_section(frame, at, n, room.symbols) if at >= 0 else -1
    if at != frame.size:
        return False
    planes = Planes(room.symbols, packed, low.view(_low_word(words)), steps)
    return bool(kernels.join_frame(words, span, expected, layout, signed, planes))


def _find(frame: Array, at: int, n: int, room: Array) -> tuple[Array, int]:
    """The bytes of a section: where they lie in the frame, if they are there as they are, or decoded into ``room``."""
    if at >= 0 and frame[at : at + 1] == in_numpy.RAW:
        end = at + 8 + aligned(n)
        length = int.from_bytes(frame[at + 4 : at + 8].tobytes(), "little")
        return (frame[at + 8 : at + 8 + n], end) if length == n and end <= frame.size else (room, -1)
    return room, _kernels().get_section(frame, at, n, room) if at >= 0 else -1


def _put_bytes(words: Array, span: Span) -> bytes:
    kernels, room, at = _kernels(), _room(words.itemsize), 0
    planes = words[span.first : span.first + span.n].view(np.uint8).reshape(span.n, words.itemsize)
    for k in range(words.itemsize):
        at = kernels.put_section(np.ascontiguousarray(planes[:, k]), span.n, room.out, at, room.words)
    return _shorter(room.out[:at], words, span)


def _get_bytes(words: Array, span: Span, frame: Array) -> bool:
    here = words[span.first : span.first + span.n].view(np.uint8)
    if frame.size == here.size:
        here[:] = frame
        return True
    kernels, room, at = _kernels(), _room(), 0
    planes = here.reshape(span.n, words.itemsize)
    for k in range(words.itemsize):
        at = kernels.get_section(frame, at, span.n, room.symbols) if at >= 0 else -1
        planes[:, k] = room.symbols[: span.n]
    return at == frame.size


def _shorter(code: Array, words: Array, span: Span) -> bytes:
    return code.tobytes() if code.size < span.n * words.itemsize else words[span.first : span.first + span.n].tobytes()


# --- what is expected ----------------------------------------------------------------------------------------------


def _predict(
    words: Array, shape: tuple[int, ...], given: Array, layout: Layout, threads: int | None
) -> tuple[Expected, int]:
    """What takes the fewest bits, of rows and columns or not, the second moment or not; and whether signs are set."""
    rows = shape[0] if len(shape) > 1 else 1
    others = [words[:0], given] if given.size else [given]
    plain = [Expected(words.size // rows, _NONE, _NONE, other, _usual(words, other, layout)) for other in others]
    nothing = min(plain, key=lambda each: _bits(words, each, layout))
    expected, signed = _of_rows(words, rows, nothing, layout, threads)
    if min(rows, nothing.columns) == 1 or words.size < _FEWEST:
        return nothing, signed
    saved = _bits(words, nothing, layout) - _bits(words, expected, layout)
    return (expected if saved > 8 * (rows + nothing.columns) else nothing), signed


def _usual(words: Array, given: Array, layout: Layout) -> int:
    """The middle of some steps, as far as they are not 0."""
    some = slice(0, words.size, max(1, words.size // 1024))
    magnitude = (1 << 8 * words.itemsize - 1) - 1
    steps = (words[some] & magnitude).astype(np.int64) >> layout.shift
    over = steps - ((given[some] & magnitude).astype(np.int64) >> layout.given_shift if given.size else 0)
    over = np.sort(over[steps > 0])
    return int(over[over.size // 2]) if over.size else 0


def _of_rows(
    words: Array, rows: int, nothing: Expected, layout: Layout, threads: int | None
) -> tuple[Expected, int]:
    """With the mean step of each row and of each column, rounded; and whether any sign is set."""
    count, columns = _threads(threads), nothing.columns
    share = max(1, -(-rows // count), FRAME // columns)
    parts = [Span(first, min(share, rows - first)) for first in range(0, rows, share)]
    row_sums, column_sums = np.zeros(rows, np.int64), np.zeros((len(parts), columns), np.int64)

    def add(words: Array, number: int) -> bool:
        return bool(_kernels().sums(words, parts[number], nothing, layout, row_sums, column_sums[number]))

    signed = any(list(_each(add, words, range(len(parts)), threads)))
    row_steps = _rounded(row_sums - columns * nothing.base, columns)
    column_steps = _rounded(column_sums.sum(0) * columns - row_sums.sum(), rows * columns)
    return nothing._replace(row_steps=row_steps, column_steps=column_steps), int(signed)


def _rounded(sums: Array, count: int) -> Array:
    return np.clip((2 * sums + count) // (2 * count), -127, 127).astype(np.int8)


def _bits(words: Array, expected: Expected, layout: Layout) -> float:
    """About how many bits the steps would take, from some of them."""
    runs = min(_SAMPLE_RUNS, -(-words.size // _SAMPLE_RUN))
    counts, total = np.zeros(256, np.int64), 0
    for k in range(runs):
        first = (words.size - min(_SAMPLE_RUN, words.size)) * k // max(1, runs - 1)
        n = min(_SAMPLE_RUN, words.size - first)
        _kernels().histogram(words, Span(first, n), expected, layout, counts)
        total += n
    some = counts[counts > 0]
    bits = -float((some * np.log2(some / total)).sum()) + 16.0 * counts[in_numpy.ESCAPE]
    return bits * words.size / total


def _expected(code: Encoded, second_moment: Tensor | None) -> Expected:
    rows = code.shape[0] if len(code.shape) > 1 else 1
    columns = code.numel // rows
    steps = np.frombuffer(code.steps, np.int8)
    if steps.size not in (0, rows + columns) or not -(1 << 12) <= code.base <= 1 << 12:
        raise CorruptCode(f"what is expected does not fit shape {code.shape}")
    row_steps, column_steps = (steps[:rows], steps[rows:]) if steps.size else (_NONE, _NONE)
    word = _LAYOUTS[code.dtype][0]
    given = _words(second_moment) if code.given and second_moment is not None else np.zeros(0, word)
    return Expected(columns, row_steps, column_steps, given, code.base)


# --- words, rooms and threads --------------------------------------------------------------------------------------


def _layout(dtype: torch.dtype) -> Layout:
    _, mantissa, low_bits = _LAYOUTS[dtype]
    return Layout(mantissa - _STEP_BITS, low_bits, mantissa - _STEP_BITS + 1)


def _low_word(words: Array) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if words.itemsize == 4 else np.uint8


def _words(tensor: Tensor) -> Array:
    """The bits of a tensor, flat: unsigned words of a number's size, or of its bytes where there are none such."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view(torch.uint8).numpy().view(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def _elements(shape: tuple[int, ...], rows: tuple[int, int]) -> tuple[int, int]:
    first, last = rows
    if not shape or not 0 <= first <= last <= shape[0]:
        raise ValueError(f"rows {rows} of a tensor of shape {shape}")
    of_row = int(np.prod(shape[1:], dtype=np.int64))
    return first * of_row, last * of_row


class _Room(threading.local):
    """What a thread works in, kept from frame to frame: 3 MB, and more where numbers have more than 4 bytes."""

    def __init__(self) -> None:
        self.symbols, self.packed = np.empty(FRAME, np.uint8), np.empty(FRAME, np.uint8)
        self.low, self.escapes = np.empty(2 * FRAME, np.uint8), np.empty(FRAME, np.uint16)
        self.words, self.out = np.empty(2 * FRAME + 1024, np.uint16), np.empty(0, np.uint8)


_rooms = _Room()


def _room(itemsize: int = 4) -> _Room:
    if _rooms.out.size < (itemsize + 3) * (FRAME + 1024):
        _rooms.out = np.empty((itemsize + 3) * (FRAME + 1024), np.uint8)
    return _rooms


@cache
def _kernels() -> ModuleType:
    """Compiled where Numba is, else in NumPy: the same bytes, a hundred times slower."""
    if find_spec("numba") is None:
        return in_numpy
    from tq.kernels import planes

    return planes


def _threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be positive, got {threads}")
    return threads or torch.get_num_threads()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lossless")


def _each(work: Callable[[Array, Any], Any], words: Array, items: Iterable[Any], threads: int | None) -> Iterator[Any]:
    """``work(words, item)`` for each item, in order."""
    items = list(items)
    count = min(_threads(threads), len(items))
    if count < 2:
        return (work(words, item) for item in items)
    return _pool(count, os.getpid()).map(lambda item: work(words, item), items)

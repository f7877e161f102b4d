"""One file of many records, and buffers that go around between it and the computation.

A reader and a writer thread move whole pages past the page cache (``tq.train.offload``), so that what is read ahead and
what is written behind costs the computation no time as long as the disk keeps up.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq.train.offload import PAGE, aligned


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that so many bytes take."""
    return -(-nbytes // PAGE) * PAGE


HUGE = 2 << 20  # bytes of a large page
ADVICE = 14  # MADV_HUGEPAGE


def large_room(nbytes: int) -> int:
    """Bytes that a buffer of ``nbytes`` takes beside them, to start at a large page."""
    return HUGE if nbytes >= 2 * HUGE and sys.platform == "linux" else 0


def buffer_of(nbytes: int) -> Tensor:
    """uint8 [nbytes] that starts at a page; of 4 MiB or more at a large one, in large pages where the system has them.

    For a transfer past its cache it must find and hold every page, and finds one of 2 MiB as fast as one of 4 KiB.
    """
    if large_room(nbytes) == 0:
        return aligned(nbytes)
    raw = torch.empty(nbytes + HUGE, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE
    buffer = raw[start : start + nbytes]
    whole = nbytes // HUGE * HUGE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(whole), ADVICE)
    return buffer


class Pages:
    """A file of a fixed size that is read and written in whole pages.

    direct: whether transfers go past the page cache; bytes_read, bytes_written: so far; read_s, write_s: inside the
    system's calls.

    Args:
        folder: in which it lies.
        nbytes: its size; rounded up to pages.
        name: of the file, which is kept; None for a file without a name, lost with the process.
    Raises:
        OSError: there is no room, before anything is written.
    """

    def __init__(self, folder: Path, nbytes: int, name: str | None = None) -> None:
        self.nbytes = whole_pages(nbytes)
        self.bytes_read = self.bytes_written = 0
        self.read_s = self.write_s = 0.0
        if name is None:
            self._file, path = tempfile.mkstemp(prefix="tq-stream-", dir=folder)
            os.unlink(path)
        else:
            self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self.nbytes)
            else:
                os.truncate(self._file, self.nbytes)
        except OSError:
            self.close()
            raise
        self.direct = self._past_the_cache()

    def _past_the_cache(self) -> bool:
        try:
            import fcntl

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        except (ImportError, AttributeError, OSError):  # another system, or a file system in memory
            return False
        return True

    def _whole(self, move: Callable[..., int], offset: int, buffer: Tensor) -> None:
        data, done = memoryview(buffer.numpy().data), 0
        while done < buffer.nbytes:
            count = move(self._file, [data[done:]], offset + done)
            if count <= 0:
                raise OSError(f"transfer broke off after {done} of {buffer.nbytes} bytes")
            done += count

    def read(self, offset: int, buffer: Tensor) -> None:
        """Fills ``buffer``, uint8 of whole pages from a page on, with what lies at ``offset``."""
        began = time.perf_counter()
        self._whole(os.preadv, offset, buffer)
        self.read_s += time.perf_counter() - began
        self.bytes_read += buffer.nbytes

    def write(self, offset: int, buffer: Tensor) -> None:
        """``buffer``, as in ``read``, goes to ``offset``."""
        began = time.perf_counter()
        self._whole(os.pwritev, offset, buffer)
        self.write_s += time.perf_counter() - began
        self.bytes_written += buffer.nbytes

    def sync(self) -> None:
        """Returns when what was written is on the disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """The file is let go of; a nameless one is gone."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.close()


class Threads:
    """One reader and one writer, and how long the computation waited for them."""

    def __init__(self) -> None:
        self.readers, self.writers = (ThreadPoolExecutor(1, f"tq-stream-{name}") for name in ("in", "out"))
        self.waited_s = 0.0
        before = threading.stack_size(1 << 20)
        try:
            for pool in (self.readers, self.writers):  # now, while there is room for their stacks
                pool.submit(time.perf_counter).result()
        finally:
            threading.stack_size(before)

    def result(self, future: Future[Tensor]) -> Tensor:
        """What a transfer gives, and the wait for it is counted."""
        began = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        self.readers.shutdown()
        self.writers.shutdown()


class Lane:
    """``count`` buffers of ``nbytes`` that go around between a file and the computation.

    A record must not be asked for while a write of it was not begun; a read waits for the writes before it.
    """

    def __init__(self, pages: Pages, threads: Threads, nbytes: int, count: int) -> None:
        self.pages, self.threads, self.nbytes = pages, threads, whole_pages(nbytes)
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(None)  # allocated when it is first needed
        self._writing: dict[int, Future[None]] = {}  # by record
        self._asked: dict[int, Future[Tensor]] = {}

    def take(self) -> Tensor:
        """A free buffer; waits for one."""
        buffer = self._free.get()
        return buffer_of(self.nbytes) if buffer is None else buffer

    def give(self, buffer: Tensor) -> None:
        """The buffer is free again."""
        self._free.put(buffer)

    def ask(self, record: int, offset: int, start: int, end: int) -> None:
        """Lets bytes ``start`` to ``end`` of a record that lies at ``offset`` come; nothing if they are on their way.

        One request per record at a time."""
        if record not in self._asked:
            self._asked[record] = self.threads.readers.submit(self._read, record, offset, start, end)

    def _read(self, record: int, offset: int, start: int, end: int) -> Tensor:
        before = self._writing.get(record)
        if before is not None:
            before.result()
        buffer = self.take()
        try:
            self.pages.read(offset + start, buffer[start:end])
        except BaseException:
            self.give(buffer)
            raise
        return buffer

    def fetch(self, record: int, offset: int, start: int, end: int) -> Tensor:
        """The buffer with these bytes of the record in their places."""
        self.ask(record, offset, start, end)
        return self.threads.result(self._asked.pop(record))

    def write(self, record: int, offset: int, buffer: Tensor, end: int, free: bool = True) -> None:
        """Lets the first ``end`` bytes of the buffer go; it is free afterwards, unless it belongs to somebody."""
        # One of each layer of a deep model would lie between the freed buffers, and the heap could not join them.
        for one in [one for one, before in self._writing.items() if before.done() and before.exception() is None]:
            del self._writing[one]
        self._writing[record] = self.threads.writers.submit(self._write, offset, buffer, end, free)

    def _write(self, offset: int, buffer: Tensor, end: int, free: bool) -> None:
        try:
            self.pages.write(offset, buffer[:end])
        finally:
            if free:
                self.give(buffer)

    def written(self, record: int) -> None:
        """Returns when the last write of a record is done."""
        before = self._writing.pop(record, None)
        if before is not None:
            began = time.perf_counter()
            before.result()
            self.threads.waited_s += time.perf_counter() - began

    def drain(self) -> None:
        """Returns when nothing is under way; raises what went wrong."""
        for record in list(self._asked):
            self.give(self._asked.pop(record).result())
        for record in list(self._writing):
            self.written(record)


class Spill:
    """Tensors that wait for their use: in memory, in few bits, or in records of a scratch file.

    Args:
        where: "memory", or bits (a ``Codec``'s) in which they lie in memory, or "place" for a file in ``folder``.
        nbytes: of the largest.
        records: how many numbers there are.
    """

    def __init__(self, where: str | int, folder: Path | None, threads: Threads, nbytes: int, records: int) -> None:
        self.where = where
        self.held: dict[int, Any] = {}
        self.step_bytes = whole_pages(nbytes)
        self.lane: Lane | None = None
        if where == "place":
            if folder is None:
                raise ValueError("kept 'place' needs a folder to lie in, got place=None")
            self.lane = Lane(Pages(folder, self.step_bytes * records), threads, nbytes, 3)
        if isinstance(where, int):
            from tq.quant.codec import Codec

            self.codec = Codec(where, scale_dtype=torch.bfloat16).derive("inputs")

    def put(self, record: int, x: Tensor, step: int = 0) -> None:
        """Keeps a contiguous tensor under a number; step: of the seed where bits are few."""
        if self.lane is not None:
            buffer = self.lane.take()
            buffer[: x.nbytes].copy_(x.reshape(-1).view(torch.uint8))
            self.lane.write(record, record * self.step_bytes, buffer, whole_pages(x.nbytes))
            self.held[record] = (x.shape, x.dtype)
        elif isinstance(self.where, int):
            self.held[record] = self.codec.derive(record).at_step(step).encode(x)
        else:
            self.held[record] = x

    def ask(self, record: int) -> None:
        """Lets it come."""
        if self.lane is not None and record in self.held:
            shape, dtype = self.held[record]
            self.lane.ask(record, record * self.step_bytes, 0, whole_pages(shape.numel() * dtype.itemsize))

    def get(self, record: int) -> Tensor:
        """The tensor, in memory of its own, which is then no longer kept."""
        held = self.held.pop(record)
        if self.lane is not None:
            shape, dtype = held
            size = shape.numel() * dtype.itemsize
            buffer = self.lane.fetch(record, record * self.step_bytes, 0, whole_pages(size))
            x = buffer[:size].clone().view(dtype).view(shape)
            self.lane.give(buffer)
            return x
        return held.codec.decode(held) if isinstance(self.where, int) else held

    @property
    def nbytes(self) -> int:
        """Bytes held in memory now."""
        if self.lane is not None:
            return 0
        return sum(x.nbytes for x in self.held.values())

    def clear(self) -> None:
        """Forgets everything."""
        if self.lane is not None:
            self.lane.drain()
        self.held.clear()

"""A memory of fixed size over a real file: what a policy's misses cost, with nothing but the reads between them.

The policy's decisions (``tq.systems.tiers.replay``) are made beforehand and carried out by one compiled loop, which
reads what misses past the page cache and adds up what it finds. So the cost of deciding is not measured, and that of
a hit is the sum over a block that lies in memory.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tq.systems import tiers
from tq.train.stream.files import Pages, buffer_of

TRACES: dict[str, Callable[[int, int], NDArray[np.int64]]] = {"cyclic": tiers.cyclic, "sawtooth": tiers.sawtooth}


@cache
def _loop() -> Any:
    """The compiled loop: (file, memory, blocks, misses, slots, bytes a block) -> sum of all that was looked at."""
    import numba

    pread = ctypes.CDLL(None, use_errno=True).pread
    pread.restype, pread.argtypes = ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64]

    @numba.njit(nogil=True)
    def run(file: int, memory: Any, blocks: Any, missed: Any, slots: Any, words: int) -> Any:
        base, total = memory.ctypes.data, np.uint64(0)
        for at in range(len(blocks)):
            start = slots[at] * words
            if missed[at]:
                got = pread(file, base + 8 * start, 8 * words, 8 * words * blocks[at])
                if got != 8 * words:
                    return total, at
            block = memory[start : start + words]  # from 0 on, so that the compiler sums many at once
            for i in range(len(block)):
                total += block[i]
        return total, -1

    return run


def cliff(
    folder: str, block_bytes: int, capacity: int, ratio: float, trace: str, policy: str, *, rounds: int = 3
) -> dict[str, float]:
    """One point: a set of ``ratio`` times the capacity (in blocks), read twice in each of ``rounds`` turns: {"misses":
    share of the accesses; "access_s", "hit_s", "miss_s": mean seconds of one, of one where all fit, of what the policy
    misses read alone}. Medians of turns, of which the second pass counts, as machines and drives change in seconds."""
    blocks = max(1, round(ratio * capacity))
    once = TRACES[trace](blocks, 1)
    found = tiers.replay(np.tile(once, 1 + 2 * rounds), capacity, policy, len(once))
    pages = Pages(Path(folder), block_bytes * blocks)
    pool, beside = (buffer_of(block_bytes * capacity) for _ in range(2))
    words = block_bytes // 8
    few = once[once < capacity]  # what is held, in the order of the trace
    n = len(once)
    def timed(
        memory: Tensor, which: NDArray[np.int64], read: bool | NDArray[np.bool_], slots: NDArray[np.int64]
    ) -> float:
        missed = np.broadcast_to(read, len(which)).copy()
        content = memory.numpy().view(np.uint64)
        began = time.perf_counter()
        total, broke = _loop()(pages._file, content, which, missed, slots, words)
        took = time.perf_counter() - began
        if broke >= 0:
            raise OSError(f"a read of {block_bytes} bytes broke off: {os.strerror(ctypes.get_errno())}")
        expected = int(sum(int(b) % 251 * 0x0101010101010101 for b in which.tolist()) * words % 2**64)
        if int(total) != expected:
            raise AssertionError("the pool held another block than the policy says")
        return took

    def access(number: int) -> float:
        part = slice(number * n, (number + 1) * n)
        return timed(pool, once, found.missed[part], found.place[part])

    def misses(number: int) -> float:
        """Seconds of each miss of this pass, read alone to its place; of reading everything where none misses."""
        part = slice(number * n, (number + 1) * n)
        if not (missed := found.missed[part]).any():
            return timed(beside, once, True, np.arange(n) % capacity) / n
        return timed(beside, once[missed], True, found.place[part][missed]) / int(missed.sum())

    try:
        for number in range(blocks):
            pages.write(number * block_bytes, beside[:block_bytes].fill_(number % 251))
        beside.fill_(0)
        access(0)
        turns = []
        for turn in range(rounds):
            timed(beside, few, True, few)
            hit = [timed(beside, few, False, few) for _ in range(2)][1] / len(few)
            access(2 * turn + 1)
            mean = access(2 * turn + 2) / n
            turns.append((hit, mean, misses(2 * turn + 2)))  # what it missed, read again after a whole pass
        hit, mean, miss = (statistics.median(column) for column in zip(*turns, strict=True))
    finally:
        pages.close()
    steady = found.missed[n:]
    return {
        "blocks": blocks, "misses": float(steady.mean()), "access_s": mean, "hit_s": hit, "miss_s": miss,
        "direct": float(pages.direct),
    }  # fmt: skip


def slowdown(point: dict[str, float]) -> float:
    """Times as long as a hit that a mean access took."""
    return point["access_s"] / point["hit_s"]


def modelled(point: dict[str, float]) -> float:
    """The same by the model: hits and misses at their own cost."""
    return float(tiers.accesses_s(point["misses"], point["hit_s"], point["miss_s"])) / point["hit_s"]


def ahead(folder: str, block_bytes: int, capacity: int, ratio: float, compute_s: float) -> dict[str, float]:
    """Sawtooth passes that compute for ``compute_s`` on each block, with and without reading ahead.

    What is held follows LRU; a thread reads the misses in their order into blocks of its own, two ahead. Returns mean
    seconds of an access: plain_s, ahead_s, and in_memory_s where nothing is read.
    """
    from concurrent.futures import ThreadPoolExecutor

    blocks = round(ratio * capacity)
    trace = tiers.sawtooth(blocks, 2)
    missed = tiers.replay(trace, capacity, "lru").missed
    pages = Pages(Path(folder), block_bytes * blocks)
    buffers = [buffer_of(block_bytes).fill_(1) for _ in range(3)]

    def work() -> None:
        until = time.perf_counter() + compute_s
        while time.perf_counter() < until:
            pass

    def once(depth: int, read: bool) -> float:
        wanted = [int(trace[at]) for at in np.flatnonzero(missed)] if read else []
        with ThreadPoolExecutor(1) as reader:
            coming = [reader.submit(pages.read, b * block_bytes, buffers[k % 3]) for k, b in enumerate(wanted[:depth])]
            began = time.perf_counter()
            for _, miss in zip(trace, missed, strict=True):
                if miss and read:
                    if not depth:
                        pages.read(wanted.pop(0) * block_bytes, buffers[0])
                    else:
                        coming.pop(0).result()
                        wanted.pop(0)
                        if len(wanted) >= depth:
                            coming.append(reader.submit(pages.read, wanted[depth - 1] * block_bytes, buffers[0]))
                work()
            return (time.perf_counter() - began) / len(trace)

    try:
        for number in range(blocks):
            pages.write(number * block_bytes, buffers[0])
        return {"plain_s": once(0, True), "ahead_s": once(2, True), "in_memory_s": once(0, False)}
    finally:
        pages.close()

"""A memory of fixed size over a real file: what a policy's misses cost, with nothing but the reads between them.

The policy's decisions (``tq.systems.tiers.replay``) are made beforehand and carried out by one compiled loop, which
reads what misses past the page cache and adds up what it finds. So the cost of deciding is not measured, and that of
a hit is the sum over a block that lies in memory.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq.systems import tiers
from tq.train.offload import aligned
from tq.train.stream.files import Pages

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
    """One point: a set of ``ratio`` times the capacity (in blocks), read ``rounds`` times after one to warm up.

    Returns:
        misses: share of the accesses; access_s: mean seconds of one, by the median round; hit_s: of one where all fit,
        in the same memory, by the median pass of those before and after; miss_s: of one where none is held, in the
        order of the trace.
    """
    blocks = max(1, round(ratio * capacity))
    once = TRACES[trace](blocks, 1)
    found = tiers.replay(np.tile(once, 1 + rounds), capacity, policy, len(once))
    pages = Pages(Path(folder), block_bytes * blocks)
    memory = aligned(block_bytes * capacity)
    words = block_bytes // 8
    content = memory.numpy().view(np.uint64)
    try:
        for number in range(blocks):
            slot = memory[: block_bytes].fill_(number % 251)
            pages.write(number * block_bytes, slot)

        def timed(which: NDArray[np.int64], missed: NDArray[np.bool_], slots: NDArray[np.int64]) -> float:
            began = time.perf_counter()
            total, broke = _loop()(pages._file, content, which, missed, slots, words)
            took = time.perf_counter() - began
            if broke >= 0:
                raise OSError(f"a read of {block_bytes} bytes broke off: {os.strerror(ctypes.get_errno())}")
            expected = int(sum(int(b) % 251 * 0x0101010101010101 for b in which.tolist()) * words % 2**64)
            if int(total) != expected:
                raise AssertionError("the pool held another block than the policy says")
            return took

        n = len(once)
        parts = [slice(k * n, (k + 1) * n) for k in range(1 + rounds)]
        few = np.arange(min(capacity, blocks))

        def held() -> list[float]:
            """Passes over what is held, none of which reads."""
            timed(few, np.ones(len(few), bool), few)
            return [timed(few, np.zeros(len(few), bool), few) for _ in range(5)]

        hits = held()
        each = [timed(once, found.missed[part], found.place[part]) for part in parts][1:]
        every = np.ones(n, bool)
        miss = min(timed(once, every, np.arange(n) % capacity) for _ in range(2))
        hit = float(np.median(hits + held()))
    finally:
        pages.close()
    steady = found.missed[n:]
    return {
        "blocks": blocks, "misses": float(steady.mean()), "access_s": float(np.median(each)) / n,
        "hit_s": hit / len(few), "miss_s": miss / n, "direct": float(pages.direct),
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
    buffers = [aligned(block_bytes).fill_(1) for _ in range(3)]

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

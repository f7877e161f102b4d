"""Latency and bandwidth of a machine's own memories, and what blocking is worth to a matrix product.

A chase follows a random cycle through lines, one load waiting for the other, so it shows latency; on pages of 4 KiB it
also shows what the translation of addresses costs. A virtual machine may show a cache that it shares with others.
"""

from __future__ import annotations

import mmap
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LINE = 64  # bytes
_WORDS = LINE // 8
_HUGE = 2 << 20  # bytes of a huge page
WAYS = ("naive", "reordered", "blocked", "library")  # of a product


@cache
def _compiled() -> dict[str, Any]:
    import numba

    @numba.njit(nogil=True)
    def chase(following: Any, at: int, steps: int) -> int:
        for _ in range(steps):
            at = following[at]
        return at

    @numba.njit(nogil=True, fastmath=True)
    def total(x: Any, rounds: int) -> float:
        found = 0.0
        for _ in range(rounds):
            for i in range(len(x)):
                found += x[i]
        return found

    @numba.njit(nogil=True)
    def naive(a: Any, b: Any, c: Any) -> None:
        n = len(a)
        for i in range(n):
            for j in range(n):
                found = np.float32(0)
                for k in range(n):
                    found += a[i, k] * b[k, j]
                c[i, j] = found

    @numba.njit(nogil=True, fastmath=True)
    def blocked(a: Any, b: Any, c: Any, size: int) -> None:
        n = len(a)
        c[:] = 0
        for k0 in range(0, n, size):
            for j0 in range(0, n, size):
                for i in range(n):
                    row = c[i, j0 : min(n, j0 + size)]
                    for k in range(k0, min(n, k0 + size)):
                        factor, other = a[i, k], b[k, j0 : min(n, j0 + size)]
                        for j in range(len(row)):
                            row[j] += factor * other[j]

    return {"chase": chase, "total": total, "naive": naive, "blocked": blocked}


def _memory(nbytes: int, huge: bool) -> NDArray[np.int64]:
    """int64 numbers in fresh memory of this process alone, in huge pages where asked for and the system gives them."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    room = mmap.mmap(-1, max(nbytes, _HUGE) + _HUGE, **flags)
    if advice := getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None):
        room.madvise(advice)
    whole = np.frombuffer(room, np.int64)
    start = -whole.ctypes.data % _HUGE // 8
    return whole[start : start + nbytes // 8]


def huge_share(memory: NDArray[Any]) -> float | None:
    """Of the bytes of an array, how many lie in huge pages; None where the system does not tell."""
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return None
    return min(1.0, huge_bytes(text, memory.ctypes.data, memory.nbytes) / memory.nbytes)


def huge_bytes(smaps: str, address: int, nbytes: int) -> int:
    """Bytes in huge pages of the mappings that hold so many bytes at this address; smaps: as Linux tells of itself."""
    inside, found = False, 0
    for line in smaps.splitlines():
        word = line.split(maxsplit=1)[0]
        if "-" in word and not word.endswith(":"):
            first, last = (int(each, 16) for each in word.split("-"))
            inside = first < address + nbytes and last > address
        elif inside and word == "AnonHugePages:":
            found += int(line.split()[1]) << 10
    return found


def latency_s(
    nbytes: int, huge: bool = False, steps: int = 1_000_000, seed: int = 0
) -> tuple[float, float | None]:  # fmt: skip
    """(seconds of a load that waits for the one before, share of the set in huge pages or None), from a random cycle
    over all lines of a set of so many bytes."""
    lines = max(2, nbytes // LINE)
    order = np.random.default_rng(seed).permutation(lines)
    memory = _memory(lines * LINE, huge)
    memory[order * _WORDS] = np.roll(order, -1) * _WORDS
    run = _compiled()["chase"]
    at = run(memory, 0, min(steps, 2 * lines))

    def work() -> None:  # goes on where it was, so that a large set is not known from the time before
        nonlocal at
        at = run(memory, at, steps)

    return _least(work, 3) / steps, huge_share(memory)


def read_bytes_per_s(nbytes: int) -> float:
    """Bytes a second that one core adds up from a set of so many, over and over."""
    memory = _memory(nbytes, True).view(np.float64)
    memory[:] = 1.0
    run, rounds = _compiled()["total"], max(1, (1 << 26) // nbytes)
    if run(memory, 2) != 2 * len(memory):
        raise AssertionError("the rounds of a sum were not all done")
    return rounds * nbytes / _least(lambda: run(memory, rounds), 3)


def copy_bytes_per_s(nbytes: int) -> float:
    """Bytes a second that one core copies, read and written counted, between two sets of half as many."""
    source, target = (_memory(nbytes // 2, True) for _ in range(2))
    source[:] = 1
    target[:] = 0
    rounds = max(1, (1 << 26) // nbytes)

    def work() -> None:
        for _ in range(rounds):
            target[:] = source

    return rounds * nbytes / _least(work, 3)


def _least(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def caches() -> dict[str, int]:
    """Bytes of the caches that the system names; empty where it does not."""
    found = {}
    for name, key in (("L1", "LEVEL1_DCACHE_SIZE"), ("L2", "LEVEL2_CACHE_SIZE"), ("L3", "LEVEL3_CACHE_SIZE")):
        try:
            text = subprocess.run(["getconf", key], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return {}
        if text.isdigit() and int(text):
            found[name] = int(text)
    return found


def steps_up(sizes: list[int], latencies: list[float], times: float = 1.4) -> list[int]:
    """Sizes up to which latency keeps its level, for each level that ends in a rise by ``times``: estimates of caches.

    A level's latency is the least seen since it began.
    """
    found: list[int] = []
    level = latencies[0]
    for before, latency in zip(sizes, latencies[1:], strict=False):
        if latency > times * level:
            if not found or before >= 2 * found[-1]:
                found.append(before)
            level = latency
        level = min(level, latency)
    return found


def product_s(n: int, way: str, block: int = 64, seed: int = 0) -> tuple[float, float]:
    """(seconds, largest relative error) of an fp32 product of order n, on one thread.

    way: "naive"; "reordered", where rows of one factor are added to rows of the result; "blocked", which does so in
    blocks; "library", the BLAS that PyTorch calls.
    """
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    c = np.empty_like(a)
    works: dict[str, Callable[[], Any]] = {
        "naive": lambda: _compiled()["naive"](a, b, c),
        "reordered": lambda: _compiled()["blocked"](a, b, c, n),
        "blocked": lambda: _compiled()["blocked"](a, b, c, block),
        "library": lambda: torch.mm(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(c)),
    }
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}; got {way!r}")
    if way != "library":  # compiled on something small
        small = np.zeros((2, 2), np.float32)
        _compiled()["naive" if way == "naive" else "blocked"](*([small] * 3), *([] if way == "naive" else [1]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        took = _least(works[way], 1 if way == "naive" else 3)
    finally:
        torch.set_num_threads(threads)
    exact = a.astype(np.float64) @ b
    return took, float(np.abs(c - exact).max() / np.abs(exact).max())


def bytes_moved(n: int, block: int) -> float:
    """Of an fp32 product in square blocks that fit the cache: each block of both factors is read n / block times."""
    return 4.0 * (2 * n**3 / block + n**2)


def disk_rates(folder: str, nbytes: int, depth: int, total: int = 1 << 26) -> dict[str, float]:
    """Bytes a second from and to a file past the page cache, in transfers of ``nbytes``, so many at a time."""
    from concurrent.futures import ThreadPoolExecutor

    from tq.train.stream.files import Pages, buffer_of

    count = max(depth, min(4096, total // nbytes))
    pages, order = Pages(Path(folder), nbytes * count), np.random.default_rng(0).permutation(count)
    buffers = [buffer_of(nbytes).fill_(3) for _ in range(depth)]
    try:
        found = {}
        for name, move in (("write", pages.write), ("read", pages.read)):

            def lane(number: int, move: Callable[..., None] = move) -> None:
                for record in order[number::depth]:
                    move(int(record) * nbytes, buffers[number])

            with ThreadPoolExecutor(depth) as threads:
                began = time.perf_counter()
                list(threads.map(lane, range(depth)))
                found[name] = nbytes * count / (time.perf_counter() - began)
        return {**found, "direct": float(pages.direct)}
    finally:
        pages.close()

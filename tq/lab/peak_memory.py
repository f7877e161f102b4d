"""Most memory, and processor time, of all that this process starts. Linux; not of this process itself.

Children are found by descent, so those in sessions of their own (torchrun's workers) count, and those that lost their
parent do not.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Usage:
    """Filled in when the block of `watch` ends. None where the system does not tell (not Linux).

    largest_bytes: most that any one process held resident, by the kernel's high-water mark. One that comes and goes
    between two looks counts if it was waited for and held more than this process ever did.
    together_bytes: most that all held at one look: their private pages, and once the shared ones of the process that
    has most of them. Pages that a fork shares until one side writes count in both.
    cpu_s: user and system seconds of the processes that ended and were waited for.
    """

    largest_bytes: int | None = None
    together_bytes: int | None = None
    cpu_s: float | None = None


@contextmanager
def watch(every_s: float = 0.25) -> Iterator[Usage]:
    """Memory and processor time of the processes below this one from here to the end of the block."""
    usage = Usage()
    if sys.platform != "linux":
        yield usage
        return
    seen, ended = _Seen(), threading.Event()

    def look() -> None:
        while not ended.wait(every_s):
            seen.look()

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    thread = threading.Thread(target=look, name="peak memory", daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        ended.set()
        thread.join()
        seen.look()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The mark of ended children is that of this process's whole life, so it tells of the block if it has risen;
        # and each begins with the mark of the process that forked it, so it tells nothing below this one's own.
        others, mark = max(before.ru_maxrss << 10, high_water(os.getpid())), after.ru_maxrss << 10
        usage.largest_bytes = max(seen.largest_bytes, mark if mark > others else 0)
        usage.together_bytes = max(seen.together_bytes, usage.largest_bytes)
        usage.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class _Seen:
    """The largest that any look has shown."""

    def __init__(self) -> None:
        self.largest_bytes = self.together_bytes = 0

    def look(self) -> None:
        private, shared = 0, 0
        for pid in below(os.getpid()):
            try:
                resident, of_others = (int(n) * _PAGE for n in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
                self.largest_bytes = max(self.largest_bytes, high_water(pid))
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            private, shared = private + resident - of_others, max(shared, of_others)
        self.together_bytes = max(self.together_bytes, private + shared)


def high_water(pid: int) -> int:
    """Most bytes that this process has held resident; 0 when it has ended and is not waited for yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return max((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), default=0)


def below(pid: int) -> list[int]:
    """The processes that descend from `pid`, as they stand now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(stat.rpartition(")")[2].split()[1])  # the name in brackets may hold anything
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        waiting += (more := children.get(waiting.pop(), []))
        found += more
    return found

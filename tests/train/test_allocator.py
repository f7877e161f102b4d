"""Freed memory that a process keeps costs no page faults when it is taken again."""

import subprocess
import sys

SCRIPT = """
import resource, torch
from tq.train.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(16 << 20).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


def test_freed_memory_is_kept():
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    given_back, kept = map(int, found.stdout.split())
    assert given_back > 1000 and kept < given_back / 10


def test_a_c_library_without_the_setting_is_told(monkeypatch):
    from tq.train import allocator

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()

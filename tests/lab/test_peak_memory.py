"""The largest process and all together, of children, grandchildren, short-lived and forked ones; and processor time."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tq.lab import peak_memory

MIB = 1 << 20
PLAIN = 24 * MIB  # more than a bare interpreter holds
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def measured(body: str, every_s: float = 0.02, before: str = "") -> peak_memory.Usage:
    """What `watch` says of `body`, run after `before` in a process of its own: pytest's has had other children."""
    script = f"""
import subprocess, sys, time
sys.path.insert(0, {str(Path(peak_memory.__file__).parent)!r})  # without the package, which imports torch
from peak_memory import watch

def child(code, stdout=subprocess.DEVNULL):
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdout=stdout)

HOLD = "held = bytearray(b'x') * ({MIB} * {{}}); import time; time.sleep({{}})"
{before}
with watch({every_s}) as usage:
{textwrap.indent(textwrap.dedent(body), "    ")}
print(usage.largest_bytes, usage.together_bytes, usage.cpu_s)
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    largest, together, cpu_s = done.stdout.split()
    return peak_memory.Usage(int(largest), int(together), float(cpu_s))


def test_the_largest_child_and_all_together() -> None:
    usage = measured("""
        several = [child(HOLD.format(mib, 1.0)) for mib in (60, 100)]
        for one in several:
            one.wait()
    """)
    assert 100 * MIB <= usage.largest_bytes <= 100 * MIB + PLAIN
    assert 160 * MIB <= usage.together_bytes <= 160 * MIB + 2 * PLAIN


def test_a_grandchild_in_a_session_of_its_own_counts() -> None:
    usage = measured("""
        inner = HOLD.format(80, 0.5)
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
        child(code).wait()
    """)
    assert 80 * MIB <= usage.largest_bytes <= 80 * MIB + PLAIN


def test_what_ends_between_two_looks_is_still_seen() -> None:
    usage = measured("child(HOLD.format(90, 0)).wait()", every_s=60)
    assert 90 * MIB <= usage.largest_bytes <= 90 * MIB + PLAIN
    assert usage.together_bytes == usage.largest_bytes


def test_what_is_not_waited_for_is_seen_when_it_lives_through_a_look() -> None:
    usage = measured("""
        left = child(HOLD.replace("import time", "print(flush=True); import time").format(70, 3), subprocess.PIPE)
        left.stdout.readline()  # it holds them now
        time.sleep(0.2)
    """)
    assert 70 * MIB <= usage.largest_bytes <= 70 * MIB + PLAIN


def test_what_was_freed_before_the_look_counts() -> None:
    """The mark is the kernel's, not that of the moment of a look."""
    usage = measured(f"""
        code = "held = bytearray(b'x') * {MIB} * 120; del held; print(flush=True); import time; time.sleep(3)"
        left = child(code, subprocess.PIPE)
        left.stdout.readline()  # freed
        time.sleep(0.2)
    """)
    assert usage.largest_bytes >= 120 * MIB


def test_earlier_children_and_this_process_do_not_count() -> None:
    before = f"child(HOLD.format(110, 0)).wait(); mine = bytearray(b'x') * {MIB} * 150; del mine"
    usage = measured("time.sleep(0.3)", before=before)
    assert usage.largest_bytes == 0 and usage.cpu_s == pytest.approx(0)
    assert measured("child(HOLD.format(1, 0.6)).wait()", before=before).largest_bytes <= PLAIN


def test_processor_time_is_that_of_the_children() -> None:
    usage = measured("""
        burn = "import time\\nwhile time.process_time() < 0.5: pass"
        child(burn).wait()
        start = time.process_time()
        while time.process_time() < start + 0.5: pass
    """)
    assert usage.cpu_s is not None and 0.5 <= usage.cpu_s <= 0.8


def test_descent(tmp_path: Path) -> None:
    """By parents, not by name or session; a name with brackets and spaces is read over."""
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([odd, "30"], start_new_session=True)
    try:
        deadline = time.monotonic() + 10
        while process.pid not in peak_memory.below(os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.pid in peak_memory.below(os.getpid())
        assert os.getpid() in peak_memory.below(os.getppid())
        assert peak_memory.below(process.pid) == []
    finally:
        process.kill()
        process.wait()
    assert process.pid not in peak_memory.below(os.getpid())


def test_an_error_in_the_block_passes_and_leaves_no_thread() -> None:
    with pytest.raises(KeyError):
        with peak_memory.watch(0.01):
            raise KeyError("x")
    assert all(thread.name != "peak memory" for thread in threading.enumerate())

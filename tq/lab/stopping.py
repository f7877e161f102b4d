"""A process that the kernel stops for a time, with every thread that it has: a rank that is late for no reason of its
own. A rank that sleeps still has threads that receive; one that is stopped has none."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from types import TracebackType

from tq.lab.net.namespaces import end_with_parent

LEAST_S = 0.02  # shorter stops are slept: the helper needs a moment to see that it is asked

_WAKE = """
import os, signal, struct, sys, time
while len(asked := sys.stdin.buffer.read(8)) == 8:
    time.sleep(struct.unpack("d", asked)[0])
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


class Stopper:
    """Stops the process that it was made in, by SIGSTOP; a helper process sends SIGCONT. A context manager.

    Args:
        awake_s: of every pause, slept before the stop.

    Example:
        >>> with Stopper() as stopper:
        ...     began = time.monotonic()
        ...     stopper.pause(0.1)
        >>> 0.1 <= time.monotonic() - began < 5
        True
    """

    def __init__(self, awake_s: float = 0.0) -> None:
        self.awake_s, self._me = awake_s, os.getpid()
        self._helper = subprocess.Popen(
            [sys.executable, "-S", "-c", _WAKE, str(self._me)], stdin=subprocess.PIPE, preexec_fn=end_with_parent
        )

    def pause(self, seconds: float) -> None:
        """Return after so many seconds, stopped for all of them but the first ``awake_s``.

        Raises:
            RuntimeError: in another process than the one that it was made in, which would wait for ever.
        """
        if os.getpid() != self._me:
            raise RuntimeError("a Stopper wakes the process that it was made in, and this is another one")
        awake = seconds if seconds < self.awake_s + LEAST_S else self.awake_s
        time.sleep(max(0.0, awake))
        if seconds > awake:
            assert self._helper.stdin is not None
            self._helper.stdin.write(struct.pack("d", seconds - awake))
            self._helper.stdin.flush()
            os.kill(self._me, signal.SIGSTOP)

    def close(self) -> None:
        """Ends the helper. May be called twice."""
        if self._helper.poll() is None:
            assert self._helper.stdin is not None
            self._helper.stdin.close()
            self._helper.wait()

    def __enter__(self) -> Stopper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

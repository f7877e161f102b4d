"""How a command line of this package ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def run(main: Callable[[], int]) -> int:
    """Exit code of ``main`` for a process of its own, whose reader may close the pipe early (``| head``)."""
    code: object = 0
    try:
        try:
            code = main()
        except SystemExit as stop:  # of --help and of errors
            code = stop.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
    return code if isinstance(code, int) else 0

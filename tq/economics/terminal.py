"""What the command lines of this package share: a line of progress, and how they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], name: Callable[[T], str]) -> Iterator[T]:
    """``items`` in turn; where stderr is a terminal, a line there says how far it is and what it is at."""
    shown = sys.stderr.isatty()
    for done, item in enumerate(items):
        if shown:
            print(f"\r\x1b[K{done} of {len(items)}, now {name(item)}", end="", file=sys.stderr, flush=True)
        yield item
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


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

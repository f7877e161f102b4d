"""What the C library does with memory that a training step frees."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, for what it allocates next.

    glibc hands large pieces back to the kernel at once, which clears every page of the next one; a step on the CPU
    allocates and frees gigabytes. The process then stays as large as it ever was, so this is for processes that train
    and do nothing else. Call it before the first step.

    Returns:
        False where the C library has no such setting; then nothing has changed.

    Example:
        >>> from tq.train.allocator import keep_freed_memory
        >>> kept = keep_freed_memory()
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_TOP_PAD, 1 << 26)])

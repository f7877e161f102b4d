"""The door to the file system, through which checkpoints are written: few operations, each durable once it returned.

A file is written beside its name, forced to the disk, and only then renamed, and the folder is forced to the disk after
it: whatever moment the machine stops at, the name stands for the old file or for the new one, whole. A failed ``fsync``
is final, as the kernel may have dropped the pages that it could not write (Rebello et al., ATC 2020): the new file is
given up, never retried.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PART = ".part"  # ending of what is not whole yet


class SaveFailed(OSError):
    """A checkpoint could not be written. What had been saved before is untouched."""


class Disk:
    """Operations on real files; the tests put others in its place to fail or to stop at any of them."""

    def create(self, path: Path) -> int:
        """A file descriptor of a new, empty file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, file: int, data: bytes | memoryview) -> None:
        """All of ``data``, at the end."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(file, view) :]

    def sync(self, file: int) -> None:
        """Returns when everything that was written is on the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """A second name of a file."""
        os.link(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """One folder, in one that is there."""
        path.mkdir(exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in a folder are on the disk."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


DISK = Disk()


def durable(path: Path, parts: Iterable[bytes | memoryview], disk: Disk = DISK, commit: bool = True) -> Path:
    """Write a file from parts so that ``path`` is always the old file or the new one.

    Args:
        path: of the file; its folder is made if it is missing.
        parts: of its content, made while they are written.
        disk: what writes.
        commit: False leaves the file beside its name, on the disk already, for ``put_in_place``.

    Returns:
        Where the file is: ``path``, or beside it.

    Raises:
        SaveFailed: a disk that is full, gone or read-only, in one sentence. The old file stays; nothing is left beside.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    durable_folder(path.parent, disk)
    try:
        file = attempt("write", path, lambda: disk.create(part))
        try:
            for data in parts:
                attempt("write", path, lambda data=data: disk.write(file, data))  # type: ignore[misc]
            attempt("write", path, lambda: disk.sync(file))
        finally:
            attempt("write", path, lambda: disk.close(file))
        if not commit:
            return part
        put_in_place(part, path, disk)
    except BaseException:
        with suppress(OSError):
            disk.remove(part)
        raise
    return path


def durable_folder(path: Path, disk: Disk = DISK) -> None:
    """Make a folder, and those above it, where they are missing, and return when their names are on the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        attempt("make the folder", each, lambda each=each: disk.make_folder(each))  # type: ignore[misc]
        attempt("make the folder", each, lambda each=each: disk.sync_folder(each.parent))  # type: ignore[misc]


def put_in_place(part: Path, path: Path, disk: Disk = DISK) -> None:
    """Give a file that is on the disk its name, and return when the name is there too."""
    attempt("write", path, lambda: disk.rename(part, path))
    attempt("write", path, lambda: disk.sync_folder(path.parent))


_WHY = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file would be larger than is allowed",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EIO: "the disk reports an error",
}


def attempt(what: str, path: Path, work: Callable[[], T]) -> T:
    """What ``work`` returns; an error of the system becomes a sentence."""
    try:
        return work()
    except SaveFailed:
        raise
    except OSError as error:
        why = _WHY.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
        raise SaveFailed(
            error.errno, f"could not {what} {path.name} ({why}); what was saved before it is untouched"
        ) from error

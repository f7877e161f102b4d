"""Crashes of a machine without a machine: what a disk may hold after any prefix of operations.

Data that was not forced to the disk may be missing, cut, or zeros; names that were not forced may be old or new, each
on its own. This is weaker than what any journalling file system promises (Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from tq.train.tqk.disk import Disk


@dataclass
class Inode:
    """A file's bytes, now and on the disk."""

    now: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


class Recorder(Disk):
    """Does everything for real, and remembers it."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.open: dict[int, Path] = {}

    def create(self, path):
        file = super().create(path)
        self.open[file] = path
        self.log.append(("create", path))
        return file

    def write(self, file, data):
        super().write(file, data)
        self.log.append(("write", self.open[file], bytes(data)))

    def sync(self, file):
        self.log.append(("sync", self.open[file]))  # a real fsync would cost what nobody looks at here

    def rename(self, old, new):
        super().rename(old, new)
        self.log.append(("rename", old, new))

    def link(self, old, new):
        super().link(old, new)
        self.log.append(("link", new, old))

    def remove(self, path):
        super().remove(path)
        self.log.append(("remove", path))

    def make_folder(self, path):
        super().make_folder(path)
        self.log.append(("mkdir", path))

    def remove_folder(self, path):
        super().remove_folder(path)
        self.log.append(("rmdir", path))

    def sync_folder(self, path):
        self.log.append(("sync_folder", path))


def after_crash(log: list[tuple], root: Path, target: Path, draw: random.Random) -> None:
    """Write to ``target`` one state that ``root`` may have after a crash that follows ``log``."""
    names: dict[Path, Inode | None] = {}  # on the disk; None is a folder
    waiting: list[tuple] = []  # changes of names that no folder was forced for
    inodes: dict[Path, Inode] = {}  # as the running program sees them

    def change(entry: tuple) -> None:
        kind, path = entry[0], entry[1]
        if kind == "create":
            names[path] = entry[2]
        elif kind == "mkdir":
            names[path] = None
        elif kind in ("remove", "rmdir"):
            names.pop(path, None)
        elif path in names:
            names[entry[2]] = names.pop(path)

    for entry in log:
        kind, path = entry[0], entry[1]
        if kind == "create":
            inodes[path] = Inode()
            waiting.append(("create", path, inodes[path]))
        elif kind == "write":
            inodes[path].now += entry[2]
        elif kind == "sync":
            inodes[path].safe = bytes(inodes[path].now)
        elif kind == "link":
            inodes[path] = inodes[entry[2]]
            waiting.append(("create", path, inodes[path]))
        elif kind == "sync_folder":
            for one in [one for one in waiting if one[1].parent == path]:
                change(one)
            waiting = [one for one in waiting if one[1].parent != path]
        else:
            if kind == "rename":
                inodes[entry[2]] = inodes.pop(path)
            waiting.append(entry)
    how = draw.random()
    for one in waiting:
        if draw.random() < how:
            change(one)
    for path, inode in sorted(names.items()):
        place = target / path.relative_to(root)
        if any(parent not in names for parent in path.parents if parent.is_relative_to(root) and parent != root):
            continue  # the folder never was
        if inode is None:
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        data = bytes(inode.now)
        if data != inode.safe:
            size = draw.randint(len(inode.safe), len(data))
            data = draw.choice((inode.safe, data, data[:size], data[:size] + bytes(len(data) - size)))
        with open(place, "wb", buffering=0) as file:
            os.write(file.fileno(), data) if data else None

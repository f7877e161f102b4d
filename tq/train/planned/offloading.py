"""Where values go until backward: files without names on a disk, or page-locked memory of the host."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tq.train.offload import Scratch, aligned

HOST = "host"


class Away:
    """A value that is elsewhere. Its room there is used again when nobody can ask for it any more."""

    def __init__(self, place: Place, room: Scratch | Tensor, memory: Tensor) -> None:
        self.place, self.room = place, room
        self.elements, self.dtype, self.device = memory.numel(), memory.dtype, memory.device

    def read(self) -> Tensor:
        """The memory of the value, flat, on its device."""
        nbytes = self.elements * self.dtype.itemsize
        if isinstance(self.room, Tensor):
            return self.room[:nbytes].view(self.dtype).to(self.device, copy=True)
        buffer = aligned(self.room.nbytes)
        self.room.read(buffer)
        return buffer[:nbytes].view(self.dtype).to(self.device)

    def __del__(self) -> None:
        self.place.rooms.setdefault(self.room.nbytes, []).append(self.room)


class Place:
    """``folder`` of files that lie past the page cache where the system allows it, or ``HOST``, for values of a GPU.

    OSError where there is no room.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = str(folder)
        self.name = offload_name(folder)
        self.rooms: dict[int, list[Scratch | Tensor]] = {}

    def write(self, memory: Tensor) -> Away:
        """Bring a flat tensor there."""
        size = -(-memory.nbytes // 4096) * 4096
        waiting = self.rooms.get(size)
        room = waiting.pop() if waiting else self._new(size)
        raw = memory.view(torch.uint8) if memory.numel() else memory.new_empty(0, dtype=torch.uint8)
        if isinstance(room, Tensor):
            room[: memory.nbytes].copy_(raw)
        else:
            buffer = aligned(size)
            buffer[: memory.nbytes].copy_(raw)
            room.write(buffer)
        return Away(self, room, memory)

    def _new(self, size: int) -> Scratch | Tensor:
        return aligned(size, pin=torch.cuda.is_available()) if self.folder == HOST else Scratch(self.folder, size)


def offload_name(folder: str | os.PathLike[str]) -> str:
    """Of the way to store a value there."""
    return HOST if str(folder) == HOST else "disk"

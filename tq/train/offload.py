"""AdamW whose state lies in host memory or in files between steps, and passes through the device bucket by bucket.

While one bucket is updated the next one comes and the last one goes, so that no more than three are ever on the
device. What moves is what the optimizer keeps: 8 bytes per parameter each way in fp32, 1.55 with ``state=(4, 8)``.
Files are read and written past the page cache where the system allows it (O_DIRECT), as a state that needs a disk
would not fit the cache either. They are scratch space, not checkpoints: they have no names and end with the process.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tq.train.optim import TurboQuantAdamW
from tq.train.schemes import SCHEMES
from tq.train.state import Store

PAGE = 4096  # direct transfers start and end at multiples of it, in memory and in the file
ALIGN = 256  # of a tensor in a buffer
SLAB = 1 << 28
DEPTH = 3  # buckets under way: one comes, one is updated, one goes
VARIANTS = ("exact", "gradient", "local")  # whose exchange does not look at the state


def aligned(nbytes: int, pin: bool = False) -> Tensor:
    """uint8 [nbytes] of host memory that starts at a page; pin: page-locked, so that a GPU copies by itself."""
    raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    if raw.data_ptr() % PAGE == 0:  # as page-locked memory is: a byte more and PyTorch would take twice as much of it
        return raw
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pin)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + nbytes]


class Slabs:
    """Host memory in pieces. PyTorch rounds page-locked memory up to a power of two, so pieces are cut from such."""

    def __init__(self, pin: bool) -> None:
        self.pin, self.left = pin, torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], whole pages, from a page on."""
        if self.left.nbytes < nbytes:
            self.left = aligned(max(SLAB, 1 << (nbytes - 1).bit_length()), self.pin)
        piece, self.left = self.left[:nbytes], self.left[nbytes:]
        return piece


class Scratch:
    """A file without a name in ``folder``, of a fixed size. Lost with the process.

    ``direct``: whether transfers go past the page cache. OSError where there is no room, before anything is written.
    """

    def __init__(self, folder: str | os.PathLike[str], nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self._file, name = tempfile.mkstemp(prefix="tq-state-", dir=folder)
        os.unlink(name)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self.nbytes)
            else:
                os.truncate(self._file, self.nbytes)
        except OSError:
            self.close()
            raise
        self.direct = self._past_the_cache()

    def _past_the_cache(self) -> bool:
        try:
            import fcntl

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        except (ImportError, AttributeError, OSError):  # another system, or a file system in memory
            return False
        return True

    def _whole(self, move: Callable[..., int], buffer: Tensor) -> None:
        if buffer.nbytes != self.nbytes or buffer.data_ptr() % PAGE:
            raise ValueError(f"buffer must be {self.nbytes} bytes from a page on, got {buffer.nbytes}")
        data, done = memoryview(buffer.numpy().data), 0
        while done < self.nbytes:
            count = move(self._file, [data[done:]], done)
            if count <= 0:
                raise OSError(f"transfer broke off after {done} of {self.nbytes} bytes")
            done += count

    def read(self, buffer: Tensor) -> None:
        """Fills ``buffer``, uint8 [nbytes] from ``aligned``."""
        self._whole(os.preadv, buffer)

    def write(self, buffer: Tensor) -> None:
        """The file becomes ``buffer``, uint8 [nbytes] from ``aligned``."""
        self._whole(os.pwritev, buffer)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close

class _Part(NamedTuple):
    """A tensor's place in its bucket's buffer."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int

class _Layout:
    """How the tensors of a bucket lie in one buffer of ``nbytes``, whole pages."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.parts: dict[str, _Part] = {}
        at = 0
        for name, x in tensors.items():
            self.parts[name] = _Part(x.dtype, x.shape, at, at + x.nbytes)
            at += -(-x.nbytes // ALIGN) * ALIGN
        self.nbytes = max(PAGE, -(-at // PAGE) * PAGE)
        self.content = sum(part.end - part.start for part in self.parts.values())

    def fits(self, tensors: dict[str, Tensor]) -> bool:
        found = {name: (x.dtype, x.shape) for name, x in tensors.items()}
        return found == {name: (part.dtype, part.shape) for name, part in self.parts.items()}

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {name: buffer[p.start : p.end].view(p.dtype).view(p.shape) for name, p in self.parts.items()}


class Slot:
    """Where a bucket's state lies: a buffer in host memory, or a file."""

    def __init__(self, layout: _Layout, folder: Path | None, slabs: Slabs) -> None:
        self.layout = layout
        self.file = None if folder is None else Scratch(folder, layout.nbytes)
        self.buffer = slabs.take(layout.nbytes) if folder is None else None
        self.writing: Future[None] | None = None  # what is still on its way here

    def resident(self) -> dict[str, Tensor]:
        """The tensors where they lie, if that is in memory."""
        return {} if self.buffer is None else self.layout.views(self.buffer)

    def copy(self) -> dict[str, Tensor]:
        """Copies in host memory, which can be saved as they are: not views of something larger."""
        buffer = self.buffer
        if self.file is not None:
            buffer = aligned(self.layout.nbytes)
            self.file.read(buffer)
        assert buffer is not None
        return {name: x.clone() for name, x in self.layout.views(buffer).items()}


class Transfer:
    """Brings the state of a bucket to the device and takes it back, each in a thread of its own."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.folder, self.device, self.on_gpu = folder, device, device.type == "cuda"
        self.slots: dict[int, Slot] = {}
        self.slabs = Slabs(self.on_gpu)
        self.reading: dict[int, Future[Tensor]] = {}
        self.room = threading.Semaphore(DEPTH)
        self.spare: list[Tensor] = []  # host buffers that are free
        self.spare_lock = threading.Lock()
        self.readers, self.writers = (ThreadPoolExecutor(1, f"tq-offload-{name}") for name in ("in", "out"))
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if self.on_gpu else []
        self.error: BaseException | None = None

    def _take_spare(self, nbytes: int) -> Tensor:
        """A page-aligned host buffer of so many bytes, one that is free if possible."""
        with self.spare_lock:
            for number, buffer in enumerate(self.spare):
                if buffer.nbytes == nbytes:
                    return self.spare.pop(number)
            del self.spare[: -(DEPTH - 1)]  # of other sizes, the oldest first
        return aligned(nbytes, self.on_gpu)

    def _put_spare(self, buffer: Tensor) -> None:
        with self.spare_lock:
            self.spare.append(buffer)

    # --- in ---
    def prefetch(self, number: int) -> None:
        """Lets the state of a bucket come, if it has any."""
        if number in self.slots and number not in self.reading:
            self.reading[number] = self.readers.submit(self._read, self.slots[number])

    def _read(self, slot: Slot) -> Tensor:
        if slot.writing is not None:
            slot.writing.result()
        self.room.acquire()
        try:
            return self._to_device(slot)
        except BaseException:
            self.room.release()
            raise

    def _to_device(self, slot: Slot) -> Tensor:
        if not self.on_gpu:
            staged = self._take_spare(slot.layout.nbytes)
            if slot.file is not None:
                slot.file.read(staged)
            elif slot.buffer is not None:
                staged.copy_(slot.buffer)
            return staged
        source = slot.buffer
        if slot.file is not None:
            source = self._take_spare(slot.layout.nbytes)
            slot.file.read(source)
        assert source is not None
        with torch.cuda.stream(self.streams[0]):
            arrived = torch.empty(slot.layout.nbytes, dtype=torch.uint8, device=self.device)
            arrived.copy_(source, non_blocking=True)
        self.streams[0].synchronize()
        if slot.file is not None:
            self._put_spare(source)
        return arrived

    def fetch(self, number: int, store: Store) -> Tensor | None:
        """The store's tensors are on the device; returns the buffer that they lie in, if they had a slot."""
        if number not in self.slots:
            self.room.acquire()
            return None
        self.prefetch(number)
        buffer = self._watched(self.reading.pop(number))
        store.tensors = self.slots[number].layout.views(buffer)
        return buffer

    # --- out ---
    def store(self, number: int, store: Store, buffer: Tensor | None) -> None:
        """Lets what the store holds go to its slot."""
        slot, tensors = self.slots.get(number), store.tensors
        if slot is None or not slot.layout.fits(tensors):
            try:
                slot = self.slots[number] = Slot(_Layout(tensors), self.folder, self.slabs)
            except BaseException as error:
                self.error = error
                self.room.release()
                raise
            buffer = None
        done = torch.cuda.Event() if self.on_gpu else None
        if done is not None:
            done.record(torch.cuda.current_stream(self.device))
        slot.writing = self.writers.submit(self._write, slot, tensors, buffer, done)
        store.tensors = slot.resident()

    def _write(self, slot: Slot, tensors: dict[str, Tensor], buffer: Tensor | None, done: Any) -> None:
        """buffer: what the tensors were brought in, which is written as it is where they were changed in place."""
        own = buffer if buffer is not None and not buffer.is_cuda else None
        staged = slot.buffer
        if staged is None:
            staged = own = self._take_spare(slot.layout.nbytes) if own is None else own
        try:
            if done is not None:
                self.streams[1].wait_event(done)
                with torch.cuda.stream(self.streams[1]):
                    self._into(slot.layout.views(staged), tensors)
                self.streams[1].synchronize()
            else:
                self._into(slot.layout.views(staged), tensors)
            if slot.file is not None:
                slot.file.write(staged)
        finally:
            if own is not None:
                self._put_spare(own)
            self.room.release()

    @staticmethod
    def _into(views: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        for name, view in views.items():
            if view.data_ptr() != tensors[name].data_ptr():
                view.copy_(tensors[name], non_blocking=True)

    def store_now(self, number: int, store: Store) -> None:
        """Puts what the store holds, in host memory, where it shall lie."""
        self.room.acquire()
        self.store(number, store, None)
        self.wait()

    # --- all of it ---
    def _watched(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BaseException as error:
            self.error = error
            raise

    def wait(self) -> None:
        """Returns when everything is where it lies; raises what went wrong on the way."""
        for number in list(self.reading):  # asked for, but then the step was given up
            buffer = self._watched(self.reading.pop(number))
            if not buffer.is_cuda:
                self._put_spare(buffer)
            self.room.release()
        for slot in self.slots.values():
            if slot.writing is not None:
                self._watched(slot.writing)
                slot.writing = None

    def close(self) -> None:
        self.readers.shutdown()
        self.writers.shutdown()


class OffloadedAdamW(TurboQuantAdamW):
    """``TurboQuantAdamW`` whose state lies in host memory or files between steps; the same weights, bit for bit.

    ``step`` returns while the last buckets are still in transit; ``flush`` waits for them. ``state_dict`` holds copies
    in host memory, and what is loaded does not pass through the device. The optimizer cannot be copied or pickled.

    Args:
        params: as of ``TurboQuantAdamW``. They pass in runs of ``bucket_elements``; the state of at most three runs is
            on the device.
        *args: as of ``TurboQuantAdamW``, from ``lr`` on.
        place: "host" for memory, page-locked if the parameters are on a GPU; or an existing folder, for files in it.
        **options: as of ``TurboQuantAdamW``; ``variant`` is "exact", "gradient" or "local", ``capturable`` is False.
    Raises:
        ValueError: ``place`` is no folder, or an option as above or of ``TurboQuantAdamW`` is not accepted.
        RuntimeError, OSError: in ``step``, ``flush`` or the next call, where a transfer fails (a full disk, say). The
            state is then lost and the weights may be of two steps: only ``load_state_dict`` helps.
    References:
        ZeRO-Offload (Ren et al. 2021), which computes the update where the state lies. ZeRO-Infinity (Rajbhandari et
        al. 2021), which also streams it from disks.
    Example:
        >>> import torch
        >>> from tq.train.offload import OffloadedAdamW
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = OffloadedAdamW(model.parameters(), lr=1e-3, state=(4, 8), place="host")
        >>> model(torch.ones(1, 256)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.flush()
        >>> optimizer.state_nbytes  # 65,792 parameters
        101772
    """

    _held = False  # whether the stores hold copies now

    def __init__(self, params: Any, *args: Any, place: str | os.PathLike[str] = "host", **options: Any) -> None:
        folder = None if place == "host" else Path(place)
        if folder is not None and not folder.is_dir():
            raise ValueError(f"place must be 'host' or a folder that exists, got {os.fspath(place)!r}")
        if options.get("capturable"):
            raise ValueError("capturable=True keeps the state on the device; it does not go with OffloadedAdamW")
        super().__init__(params, *args, **options)
        if self.scheme not in [SCHEMES[name] for name in VARIANTS]:
            raise ValueError(
                f"variant must be one of {', '.join(VARIANTS)}, whose exchange needs no state; got {self.variant!r}"
            )
        self._folder = folder
        self._transfer = self._new_transfer()

    def _new_transfer(self) -> Transfer:
        return Transfer(self._folder, self.param_groups[0]["params"][0].device)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedAdamW cannot be copied or pickled; use state_dict")

    @property
    def direct(self) -> bool | None:
        """Whether files go past the page cache; None where there is none yet."""
        files = [slot.file.direct for slot in self._transfer.slots.values() if slot.file is not None]
        return all(files) if files else None

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state between steps, without padding."""
        return sum(slot.layout.content for slot in self._transfer.slots.values())

    def flush(self) -> None:
        """Returns when all of the state lies in its place."""
        self._whole()
        self._transfer.wait()

    def _whole(self) -> None:
        if self._transfer.error is not None:
            raise RuntimeError("the state was lost on its way; load_state_dict helps") from self._transfer.error

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns the loss of ``closure``, if given, while the last buckets are still in transit."""
        self._whole()
        return super().step(closure)

    def _load_device(self) -> torch.device:
        return torch.device("cpu")  # on the device there may be no room

    @contextmanager
    def _state_at_hand(self, number: int, store: Store) -> Iterator[None]:
        buffer = self._transfer.fetch(number, store)
        self._transfer.prefetch(number + 1)
        try:
            yield
        except BaseException as error:
            self._transfer.error = error
            raise
        self._transfer.store(number, store, buffer)

    @contextmanager
    def _present(self, numbers: Iterable[int]) -> Iterator[None]:
        """The stores of these buckets hold copies of their state, in host memory."""
        if self._held:
            yield
            return
        self.flush()
        stores, slots = [store for _, _, store in self._buckets()], self._transfer.slots
        there = [number for number in numbers if number in slots]
        try:
            for number in there:
                stores[number].tensors = slots[number].copy()
            self._held = True
            yield
        finally:
            self._held = False
            for number in there:
                stores[number].tensors = slots[number].resident()

    def _by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        with self._present(self._transfer.slots):
            return super()._by_parameter()

    def state_dict(self) -> dict[str, Any]:
        """As of ``TurboQuantAdamW``: copies in host memory."""
        with self._present(self._transfer.slots):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """``state_dict`` as of ``TurboQuantAdamW``; it does not pass through the device. Helps after an error too."""
        with suppress(Exception):  # what was lost is replaced now
            self._transfer.wait()
        super().load_state_dict(state_dict)
        self._transfer.close()
        self._transfer = self._new_transfer()
        for number, (_, _, store) in enumerate(self._buckets()):
            if store.tensors:
                self._transfer.store_now(number, store)

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """(m, v) of ``parameter``, as of ``TurboQuantAdamW``, in host memory."""
        runs = enumerate(run for _, run, _ in self._buckets())
        with self._present(number for number, run in runs if any(p is parameter for p in run)):
            return super().moments(parameter)
